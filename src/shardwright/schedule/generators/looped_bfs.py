"""Breadth-first pipeline: GPipe on looped stages. Lamy-Poirier 2023 (arXiv 2211.05953), section 4.

Rank r holds stages r, p + r, 2p + r, ...: each microbatch passes the ranks v times, in chunks of a v-th of the
layers. A rank takes all microbatches through one chunk before it turns to the next, and back in reverse. The bubble
is GPipe's over v, (p - 1)(F + B) / v; every rank keeps all m microbatches alive. What it buys, beside the bubble, is
that a chunk's parameters are needed for one stretch of time, gathered once (ZeRO-3) and reduced early; and that
messages have as long as p - 1 microbatches take before anybody waits for them.
"""

from shardwright.schedule.action import backward, forward
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import looped


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """All F of a chunk, chunk after chunk; then all B of a chunk, last chunk first."""
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        there = [forward(stage, i) for stage in stages for i in range(num_microbatches)]
        back = [backward(stage, i) for stage in reversed(stages) for i in range(num_microbatches)]
        rows.append((*there, *back))
    return Schedule("looped-bfs", num_microbatches, looped(num_ranks, num_chunks), tuple(rows))
