"""ZB-V: zero bubble in the memory of 1F1B. Qi et al. 2024 (arXiv 2401.10241), section 6.

Each rank holds two stages, laid out as a V: down the ranks and back up. Rank 0 holds the first and the last stage, so
each microbatch's loss is computed on the rank where the microbatch began, and its gradient starts back at once. If
F = I = W, no rank idles between its first and last action; a step alone takes (p - 1)F / 2 longer than its work. Every
rank keeps 2p halves alive: p microbatches of all its layers. If F, I and W differ, ranks do wait.

Chunk 0 is the rank's stage on the way down, chunk 1 its stage on the way up.
"""

from typing import Any

from shardwright.config.array_math import least, most, where
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order for F = I = W, written for at least 2p - 1 microbatches; the writer leaves out missing microbatches."""
    rows = []
    for rank in range(num_ranks):
        num_drawn = max(num_microbatches, 2 * num_ranks - 1)
        row = Row([rank, 2 * num_ranks - 1 - rank], [range(num_microbatches)] * 2)
        row.write("F0", times=2 * (num_ranks - rank) - 1)
        row.write("F1 F0", times=rank)
        row.write("F1 I1 W1", times=num_ranks - rank)
        row.write("F0 I0 W0 F1 I1 W1", times=num_drawn - num_ranks)
        row.write("I0 I1", times=rank)
        row.write("I0 W0", times=num_ranks - rank)
        row.write("W1", times=rank)
        row.write("W0", times=rank)
        rows.append(row.actions())
    return Schedule("zb-v", num_microbatches, vee(num_ranks), tuple(rows))


def _idle_s(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    filled = least(most(m - p, 0), p - 1)
    return most((p - 1) * i - filled * w, (p - 1) * (f - (i + w) / 2), 0.0 * f)


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    waits = where(m > p, least(2 * rank, 2 * (m - 1)), 0) + 1
    return where(rank == 0, least(2 * p, 2 * m) - 1, least(p - 1 - rank, m)) / 2, waits / 2


FACTS = ScheduleFacts(
    name="zb-v",
    place=80,
    make=of_size(zb_v),
    stages_per_rank=2,
    placement=lambda num_ranks, stages_per_rank: vee(num_ranks),
    are_alternating=True,
    splits_weights=True,
    overlaps_steps=True,
    bubble="(p - 1) * F / 2",
    when="m >= 2 * p - 1 and F == I == W",
    repeated="0",
    idle_s=_idle_s,
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * least(m, p),
    waiting=_waiting,
    num_gathers=lambda p, m, v: m + 0.5,
    num_runs=lambda p, m: 1.0 * m,
    num_waits=lambda p, m, v, extra_warmup: 5.0 * p - 7,
    search_place=50,
)
