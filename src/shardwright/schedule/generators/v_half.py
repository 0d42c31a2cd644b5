"""V-Half: half of 1F1B's memory, and half of its bubble. Qi et al. 2024 (arXiv 2405.15362).

On the way down a microbatch moves one rank every two slots, and one a slot on the way back up: forward and backward
alike. So a rank whose first chunk lives long has a second chunk that lives shortly, and the sum is about 6p slots
everywhere. No rank keeps more than floor((p + 2) / 2) microbatches of its layers alive, against p of 1F1B's rank 0.
Where F = I = W the bubble is about half of 1F1B's (p = 8: 8.5 to 21). It does not grow with the number of
microbatches as long as 2F <= W + 2I and 2I <= W + 2F.
"""

from shardwright.schedule.generators.building_block import Block, from_building_block
from shardwright.schedule.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Down one rank every two slots, up one rank a slot."""
    return from_building_block("v-half", num_ranks, num_microbatches, _block)


def _block(rank: int, num_ranks: int) -> Block:
    turn = 0 if num_ranks % 2 else 3  # forward and backward of even p would fall into the same slots
    return (2 * rank, 3 * num_ranks - 2 - rank, 3 * num_ranks + turn - 1 + 2 * rank, 6 * num_ranks + turn - 2 - rank)
