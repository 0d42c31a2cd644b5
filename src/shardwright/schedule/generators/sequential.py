"""Sequential: one microbatch at a time through all stages and back. Plain layer-wise model parallelism.

Every rank but one is idle at any moment: a step takes m x p stage times. It is the order of one rank that
accumulates gradients, so it is what the other schedules are compared with.
"""

from shardwright.schedule.action import backward, forward
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line


def sequential(num_ranks: int, num_microbatches: int) -> Schedule:
    """F then B of each microbatch in turn, on every rank."""
    ranks = tuple(
        tuple(make(rank, i) for i in range(num_microbatches) for make in (forward, backward))
        for rank in range(num_ranks)
    )
    return Schedule("sequential", num_microbatches, in_line(num_ranks), ranks)
