"""V-Min: a third of 1F1B's memory, the least that a V of two chunks can have. Qi et al. 2024
(arXiv 2405.15362).

A microbatch moves one rank per slot, down and up in the forward, and down and up again in the backward. No rank keeps
more than floor((p + 4) / 3) microbatches of its layers alive; rank 0 of 1F1B keeps p. If F = I = W, the bubble is about
two thirds of 1F1B's (p = 8: 13.5 to 21). It has no slack: if F, I and W differ, ranks wait for one another in every
microbatch, and the bubble grows with the number of microbatches.
"""

from typing import Any

from shardwright.config.array_math import least, most, where
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.building_block import Block, from_building_block
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Microbatches move one rank per slot, down and up, in the forward and in the backward."""
    return from_building_block("v-min", num_ranks, num_microbatches, _block)


def _block(rank: int, num_ranks: int) -> Block:
    turn = 0 if num_ranks % 3 else 2  # without it, forward and backward of p = 3, 6, ... would fall into the same slots
    return (rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + turn + rank, 4 * num_ranks + turn - 1 - rank)


def _alive(p: Any, rank: Any, m: Any, v: Any, extra_warmup: Any) -> Any:
    return 1.0 * least(m, (p + 4) // 3)


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    """Approximate: the same for all ranks, from those on which most weight gradients wait."""
    waits = where(p < 8, 2, 3) / 2 + 0 * rank  # counted in stages, and a rank has two
    return _alive(p, rank, m, 2, 0) - waits, waits


def _idle_s(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    """Idle seconds: about two thirds of 1F1B's (Qi et al. 2024, arXiv 2405.15362). If F, I and W differ, one of the
    first two paths grows with m. Differs from the simulated step by at most 4 % of it for p >= 3 and m >= p.
    """
    correction = 0.5 * (p % 3 == 0)
    equal_idle = 2 * p - 2.5 - correction  # the idle time if F = I = W = 1
    n = m * least(1, (p - 1) / 2)
    path = most(
        (p - n) * f + (2 * n + equal_idle - correction - p - 0.5) * i + (0.5 - n) * w,
        (2 * n - 2) * f + (equal_idle + 1 - n) * i - (n - 1) * w,
        (p / 2 + 1) * f + (equal_idle - p / 2) * i - w,
    )
    return most(0.0, path)


FACTS = ScheduleFacts(
    name="v-min",
    place=100,
    make=of_size(v_min),
    stages_per_rank=2,
    placement=lambda num_ranks, stages_per_rank: vee(num_ranks),
    are_alternating=True,
    splits_weights=True,
    idle_s=_idle_s,
    alive=_alive,
    waiting=_waiting,
    num_gathers=lambda p, m, v: m + 0.5,
    num_runs=lambda p, m: 1.0 * m,
    num_waits=lambda p, m, v, extra_warmup: 6.0 * (p - 1) * m / p + 4.0 * (p - 3),
    search_place=70,
)
