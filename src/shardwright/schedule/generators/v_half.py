"""V-Half: half of 1F1B's memory, and half of its bubble. Qi et al. 2024 (arXiv 2405.15362).

A microbatch moves one rank every two slots on the way down, and one rank per slot on the way back up, in the forward
and in the backward. So if a rank's first chunk lives long, its second chunk lives briefly, and the sum is about 6p
slots on every rank. No rank keeps more than floor((p + 2) / 2) microbatches of its layers alive; rank 0 of 1F1B keeps
p. If F = I = W, the bubble is about half of 1F1B's (p = 8: 8.5 to 21). It does not grow with the number of microbatches
if 2F <= W + 2I and 2I <= W + 2F.
"""

from typing import Any

from shardwright.config.array_math import least, most, where
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.building_block import Block, from_building_block
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Microbatches move down one rank every two slots, and up one rank per slot."""
    return from_building_block("v-half", num_ranks, num_microbatches, _block)


def _block(rank: int, num_ranks: int) -> Block:
    turn = 0 if num_ranks % 2 else 3  # without it, forward and backward of even p would fall into the same slots
    return (2 * rank, 3 * num_ranks - 2 - rank, 3 * num_ranks + turn - 1 + 2 * rank, 6 * num_ranks + turn - 2 - rank)


def alive(p: Any, rank: Any, m: Any, v: Any, extra_warmup: Any) -> Any:
    """Number of microbatches that a rank keeps, of all its layers."""
    return 1.0 * least(m, (p + 2) // 2)


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    """Approximate: the same for all ranks, from those on which most weight gradients wait."""
    waits = (where(p == 2, 3, most(1, p // 4)) + 1) / 2 + 0 * rank  # counted in stages, and a rank has two
    return alive(p, rank, m, 2, 0) - waits, waits


def _idle_s(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    """Idle seconds: about half of 1F1B's (Qi et al. 2024, arXiv 2405.15362). The first path grows with m if 2I > F + W.

    Differs from the simulated step by at most 2 % of it for even p >= 4 and m >= p, and 10 % otherwise.
    """
    path = most(
        (p - m) * f + (m + p - 3) * i - (m / 2 + p / 4 + 0.5) * w,
        (p - 0.5) * f + (p - 2.5) * i - (p + 1) / 2 * w,
        (p / 2 - 1.5) * f + 1.5 * (p - 1) * i - (p + 1) / 2 * w,
        (p / 2 - 2) * f + 1.5 * (p - 1) * i - p / 2 * w,
        (p / 2 - 1.5) * f + (7 / 8 * p - 1) * i,
    )
    return most(0.0, path + where(p % 2, 0.5 * (f + i + w), 0.0))


FACTS = ScheduleFacts(
    name="v-half",
    place=90,
    make=of_size(v_half),
    stages_per_rank=2,
    placement=lambda num_ranks, stages_per_rank: vee(num_ranks),
    are_alternating=True,
    splits_weights=True,
    idle_s=_idle_s,
    alive=alive,
    waiting=_waiting,
    num_gathers=lambda p, m, v: m + 0.5,
    num_runs=lambda p, m: 1.0 * m,
    num_waits=lambda p, m, v, extra_warmup: 6.0 * (p - 1),
    search_place=60,
)
