"""ZB-H2: twice the warm-up, and no rank idles between its first and its last action. Qi et al. 2024
(arXiv 2401.10241), figure 3, bottom.

Rank 0 runs 2p - 1 forwards before its first backward, enough to last until a gradient comes back from the last rank;
at the end, weight gradients fill the wait. Between its own first and last action, a rank then has a bubble of
(p - 1)(F + I - 2W), and none if F + I <= 2W. One step alone still takes (p - 1)F longer than its work, because ranks
begin one after the other. That is hidden only if the next step may begin before the last rank has ended this one, with
no barrier at the optimizer step. The price is memory: every rank keeps min(m, 2p - 1) microbatches alive.
"""

from typing import Any

from shardwright.config.array_math import least, most, where
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line, looped


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up of 2(p - r) - 1 forwards; weight gradients run 2r microbatches late."""
    rows = []
    for rank in range(num_ranks):
        row = Row([rank], [range(num_microbatches)])
        row.write("F0", times=2 * (num_ranks - rank) - 1)
        row.write("I0 F0", times=2 * rank)
        row.write("I0 W0 F0", times=num_microbatches - 2 * rank)
        row.write("W0", times=2 * rank)
        rows.append(row.actions())
    return Schedule("zb-h2", num_microbatches, in_line(num_ranks), tuple(rows))


def _idle_s(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    filled = least(most(m - 1, 0), 2 * (p - 1))  # number of weight gradients that fill the wait
    turned = where(f > i, filled // 2, 0)  # the longest path takes the longer of a forward and an input gradient
    # If `filled` is odd, one weight gradient is left over between a forward and an input gradient.
    left_over = where(f > i, filled % 2, 0) * most(0.0, f - w)
    path = (p - 1 - filled + turned) * f + (p - 1 - turned) * i + left_over
    return most((p - 1) * (f + i) - filled * w, path, 0.0 * f)


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    waits = least(2 * rank + 1, m)
    return least(2 * (p - 1 - rank), m - waits), waits


FACTS = ScheduleFacts(
    name="zb-h2",
    place=70,
    make=of_size(zb_h2),
    placement=looped,
    splits_weights=True,
    overlaps_steps=True,
    bubble="(p - 1) * F",
    when="m >= 2 * p - 1 and I <= 2 * W <= F + I",
    repeated="(p - 1) * (F + I - 2 * W)",
    idle_s=_idle_s,
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * least(m, 2 * p - 1),
    keeps_as_1f1b=True,
    waiting=_waiting,
    num_waits=lambda p, m, v, extra_warmup: 1.0 * (p - 1),
    search_place=40,
)
