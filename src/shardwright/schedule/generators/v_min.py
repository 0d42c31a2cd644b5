"""V-Min: a third of 1F1B's memory, the least that a V of two chunks can have. Qi et al. 2024
(arXiv 2405.15362).

A microbatch moves one rank a slot, all the way down and up, and down and up again. No rank keeps more than
floor((p + 4) / 3) microbatches of its layers alive, against p of 1F1B's rank 0. Where F = I = W the bubble is about
two thirds of 1F1B's (p = 8: 13.5 to 21). It has no slack: where F, I and W differ, ranks wait for one another in
every microbatch, and the bubble grows with their number.
"""

from shardwright.schedule.generators.building_block import Block, from_building_block
from shardwright.schedule.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """One rank a slot, both ways, forward and backward."""
    return from_building_block("v-min", num_ranks, num_microbatches, _block)


def _block(rank: int, num_ranks: int) -> Block:
    turn = 0 if num_ranks % 3 else 2  # forward and backward of p = 3, 6, ... would fall into the same slots
    return (rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + turn + rank, 4 * num_ranks + turn - 1 - rank)
