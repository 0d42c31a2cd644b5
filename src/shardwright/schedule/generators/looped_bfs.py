"""Breadth-first pipeline: GPipe on looped stages. Lamy-Poirier 2023 (arXiv 2211.05953), section 4.

Rank r holds stages r, p + r, 2p + r, ...: each microbatch passes the ranks v times, in chunks of a v-th of the
layers. A rank takes all microbatches through one chunk before it turns to the next, and back in reverse. The bubble
is GPipe's over v, (p - 1)(F + B) / v; every rank keeps all m microbatches alive. There are two more gains: a chunk's
parameters are needed for one stretch of time, so they are gathered once (ZeRO-3) and their gradients reduced early; and
a message has the time of p - 1 microbatches to arrive before its receiver waits.
"""

from shardwright.config.array_math import most
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.action import backward, forward
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import looped


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """All F of a chunk, chunk after chunk; then all B of a chunk, last chunk first."""
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards = [forward(stage, i) for stage in stages for i in range(num_microbatches)]
        backwards = [backward(stage, i) for stage in reversed(stages) for i in range(num_microbatches)]
        rows.append((*forwards, *backwards))
    return Schedule("looped-bfs", num_microbatches, looped(num_ranks, num_chunks), tuple(rows))


FACTS = ScheduleFacts(
    name="looped-bfs",
    place=50,
    make=lambda shape: looped_bfs(shape.num_ranks, shape.num_microbatches, shape.virtual_stages),
    stages_per_rank=0,
    simpler="gpipe",
    placement=looped,
    bubble="(p - 1) * (F + B) / v",
    when="m >= p",
    idle_s=lambda p, m, v, f, i, w: (p - 1 + (v - 1) * most(0, p - m)) * (f + (i + w)) / v,
    fills_and_drains=True,
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * m,
    keeps_as_1f1b=True,
    num_losses=lambda m: 1.0 * m,
    # One stretch for each stage and pass, but the last forward and the first backward share one stretch.
    num_gathers=lambda p, m, v: 2.0 - 1.0 / v + 0.0 * m,
    num_waits=lambda p, m, v, extra_warmup: 2.0 * (p - 1),
    complexity=1,
    search_place=110,
)
