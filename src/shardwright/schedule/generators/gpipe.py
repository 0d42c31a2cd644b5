"""GPipe: all forwards, then all backwards. Huang et al. 2019 (arXiv 1811.06965), figure 2c.

The bubble is (p - 1)(F + B) a step; every rank keeps the activations of all m microbatches. Backwards run in the
order of the microbatches, not in reverse as in the paper's figure: the bubble is the same, and gradients are
summed in the order in which one rank would sum them.
"""

from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.action import backward, forward
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line, looped


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All F, then all B, on every rank."""
    ranks = tuple(
        tuple(make(rank, i) for make in (forward, backward) for i in range(num_microbatches))
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, in_line(num_ranks), ranks)


FACTS = ScheduleFacts(
    name="gpipe",
    place=20,
    make=of_size(gpipe),
    placement=looped,
    bubble="(p - 1) * (F + B)",
    idle_s=lambda p, m, v, f, i, w: (p - 1) * (f + (i + w)),
    fills_and_drains=True,
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * m,
    keeps_as_1f1b=True,
    num_losses=lambda m: 1.0 * m,
    num_waits=lambda p, m, v, extra_warmup: 2.0 * (p - 1),
    complexity=0,
    search_place=100,
)
