"""1F1B: as soon as a backward can run, it runs.

PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503, section 2) and DAPPLE (Fan et al. 2021, arXiv 2007.01045,
section 3). The bubble is GPipe's, (p - 1)(F + B), but rank r keeps only min(m, p - r) microbatches alive.

That leaves no slack: a rank idles while its gradient travels, and each microbatch pays for the messages there and
back. More warm-up forwards fill that time. With twice as many (`extra_warmup` = p - 1) a message of up to (F + B) / 2
is paid once per step and hop, not once per microbatch; rank r then keeps min(m, 2(p - 1 - r) + 1) microbatches alive.
"""

from typing import Any

from shardwright.config.array_math import least
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.action import Action, backward, forward
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line, looped


def one_f_one_b(num_ranks: int, num_microbatches: int, extra_warmup: int = 0) -> Schedule:
    """Warm-up forwards until the first backward can arrive, then one forward and one backward in turn.

    Each rank runs `extra_warmup` further forwards, but at most as many as there are ranks after it.
    """
    ranks = []
    for rank in range(num_ranks):
        num_after = num_ranks - 1 - rank
        warmup = min(num_microbatches, num_after + min(num_after, extra_warmup))
        row: list[Action] = [forward(rank, i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            row += [forward(rank, warmup + i), backward(rank, i)]
        row += [backward(rank, i) for i in range(num_microbatches - warmup, num_microbatches)]
        ranks.append(tuple(row))
    return Schedule("1f1b", num_microbatches, in_line(num_ranks), tuple(ranks))


def alive(p: Any, rank: Any, m: Any, v: Any, extra_warmup: Any) -> Any:
    """Number of microbatches that a rank keeps: with no `extra_warmup`, the number of ranks from this one on."""
    return 1.0 * least(m, p - rank + least(extra_warmup, p - 1 - rank))


FACTS = ScheduleFacts(
    name="1f1b",
    place=30,
    make=lambda shape: one_f_one_b(shape.num_ranks, shape.num_microbatches, shape.extra_warmup),
    understands=("extra_warmup",),
    placement=looped,
    bubble="(p - 1) * (F + B)",
    idle_s=lambda p, m, v, f, i, w: (p - 1) * (f + (i + w)),
    fills_and_drains=True,
    alive=alive,
    keeps_as_1f1b=True,
    complexity=0,
    is_simple=True,
    search_place=10,
)
