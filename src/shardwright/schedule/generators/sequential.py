"""Sequential: one microbatch at a time through all stages and back. Plain layer-wise model parallelism.

Only one rank works at any moment: a step takes m x p stage times. It has the order of one rank that accumulates
gradients, so the other schedules are compared with it.
"""

from shardwright.config.array_math import least
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.action import backward, forward
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line, looped


def sequential(num_ranks: int, num_microbatches: int) -> Schedule:
    """F then B of each microbatch in turn, on every rank."""
    ranks = tuple(
        tuple(make(rank, i) for i in range(num_microbatches) for make in (forward, backward))
        for rank in range(num_ranks)
    )
    return Schedule("sequential", num_microbatches, in_line(num_ranks), ranks)


FACTS = ScheduleFacts(
    name="sequential",
    place=10,
    make=of_size(sequential),
    placement=looped,
    bubble="m * (p - 1) * (F + B)",
    idle_s=lambda p, m, v, f, i, w: m * (p - 1) * (f + (i + w)),
    fills_and_drains=True,
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * least(1, m),
    num_waits=lambda p, m, v, extra_warmup: 2.0 * m * (p - 1),
    complexity=0,
    search_place=120,
)
