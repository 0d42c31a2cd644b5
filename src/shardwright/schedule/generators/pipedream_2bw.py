"""PipeDream-2BW: no bubble, and two versions of the weights instead of p. Narayanan et al. 2021 (arXiv 2006.09503),
section 3.1 and figure 2.

As in PipeDream, the pipeline is never flushed, but gradients add up over a batch of m microbatches before a stage
updates its weights. If m >= p, at most two batches are in flight: when batch k begins, k - 1 is not over, but k - 2 is.
So all microbatches of batch k, on all stages, use the weights after batch k - 2. A stage keeps only those and the
newest. It is gradient descent whose gradients are always late by exactly one update:
W(t + 1) = W(t) - lr * gradient at W(t - 1).
"""

from shardwright.config.phrase import say
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.one_f_one_b import alive, one_f_one_b
from shardwright.schedule.generators.pipedream import with_updates
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import looped


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_batches: int = 1) -> Schedule:
    """1F1B over a stream of batches, with an update of each stage after its last backward of each batch."""
    stream = num_microbatches * num_batches
    inner = one_f_one_b(num_ranks, stream)
    ranks = with_updates(inner.ranks, every=num_microbatches)
    return Schedule("pipedream-2bw", stream, inner.placement, ranks, weights="double-buffered")


def pipedream_2bw_faults(num_ranks: int, num_microbatches: int) -> list[str]:
    """Why a shape is not admitted."""
    if num_microbatches >= num_ranks:
        return []
    return [
        say(
            "pipedream-2bw needs m >= p microbatches between updates, else two versions of the weights are too few: "
            "m {m} < p {ranks}; use {ranks} or more",
            m=num_microbatches,
            ranks=num_ranks,
        )
    ]


FACTS = ScheduleFacts(
    name="pipedream-2bw",
    place=140,
    make=lambda shape: pipedream_2bw(shape.num_ranks, shape.num_microbatches, shape.num_steps),
    faults=of_size(pipedream_2bw_faults),
    understands=("num_steps",),
    placement=looped,
    drains=False,
    bubble="(p - 1) * (F + B)",
    repeated="0",
    alive=alive,
    not_searched="it computes other numbers than one rank does",
)
