"""ZB-H1: 1F1B whose weight gradients wait, and fill the bubble. Qi et al. 2024 (arXiv 2401.10241), figure 3, top.

Another rank waits only for the input gradient I. So the backward is cut in two, I and the weight gradient W. Gradients
come back sooner, after I per hop and not after B, and delayed W fill part of a rank's idle time. The bubble is
(p - 1)(F + I - W) if W <= I: a third of 1F1B's if F = I = W. Rank r delays its W by r microbatches, so every rank keeps
min(m, p) microbatches alive: as many as rank 0 of 1F1B.
"""

from typing import Any

from shardwright.config.array_math import least, most
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line, looped


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The forwards and backwards of 1F1B; weight gradients run `rank` microbatches late."""
    rows = []
    for rank in range(num_ranks):
        row = Row([rank], [range(num_microbatches)])
        row.write("F0", times=num_ranks - 1 - rank)
        row.write("F0 I0", times=rank)
        row.write("F0 I0 W0", times=num_microbatches - rank)
        row.write("W0", times=rank)
        rows.append(row.actions())
    return Schedule("zb-h1", num_microbatches, in_line(num_ranks), tuple(rows))


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    waits = least(rank + 1, m)
    return least(p - 1 - rank, m - waits), waits


FACTS = ScheduleFacts(
    name="zb-h1",
    place=60,
    make=of_size(zb_h1),
    placement=looped,
    splits_weights=True,
    bubble="(p - 1) * (F + I - W)",
    when="m >= p and W <= I",
    idle_s=lambda p, m, v, f, i, w: (p - 1) * most(f + i - w, i, f),
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * least(m, p),
    keeps_as_1f1b=True,
    waiting=_waiting,
    num_waits=lambda p, m, v, extra_warmup: 4.0 * (p - 1),
    search_place=30,
)
