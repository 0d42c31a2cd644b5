"""Uneven stages where a rank holds several: interleaved, V-shaped and bidirectional pipelines.

What sets the pace is the sum over a rank's stages, and these lie apart in the model, so no recursion over the layers
has all it needs. Instead layers are exchanged: a stage gives one, another gets one, and those between shift. From an
even cut the exchange that helps most is made until none helps: first against what does not fit, then against the
slowest rank, then the second slowest, and so on. Where layers are alike this ends at the smallest slowest rank: while
that rank has more layers than in the best cut, another has fewer, and stays faster than it with one more. Where layers
differ it ends at or near it (tests/planner/test_stages.py says how near).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.planner.stages.partition_dp import NoFitError, check_layers
from shardwright.planner.stages.pieces import PipelineSlot, Stages, may_be_empty, stages_of
from shardwright.sharding.stage_placement import StagePlacement

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_DIGITS = 9  # to which loads are compared, so that rounding is no progress


def best_chunks(seats: Sequence[PipelineSlot], placement: StagePlacement, num_microbatches: int) -> Stages:
    """A cut into the placement's stages whose slowest rank is fast, and that fits all memories.

    A seat for each pipeline rank. NoFitError if none was found, ValueError if there are too few layers.
    """
    num_layers, num_stages = len(seats[0].pieces) - 2, placement.num_stages
    check_layers(num_layers, num_stages)
    least = np.array([int(not may_be_empty(stage, num_stages)) for stage in range(num_stages)])
    loads = _Loads.of(seats, placement)
    rest = num_layers - int(least.sum())
    counts = least + np.diff(np.arange(num_stages + 1) * rest // num_stages)  # nearly equal parts
    score = loads.scores(counts[None])[0]
    while True:
        moved = _exchanges(counts, least)
        if not len(moved):
            break
        scores = loads.scores(moved)
        best = np.lexsort(scores.T[::-1])[0]
        if not tuple(scores[best]) < tuple(score):
            break
        counts, score = moved[best], scores[best]
    excess = loads.seconds_and_excess(counts[None])[1][0]
    if excess.max() > 0:
        raise NoFitError(int(excess.argmax()), float(excess.max()), num_layers, num_stages)
    return stages_of(tuple(map(int, counts)), seats, placement, num_microbatches)


@dataclass(frozen=True)
class _Loads:
    """Running sums over the layers, [a rank's stage][layers before], for each stage that a rank holds."""

    ranks: Integers  # [rank's stage]
    stages: Integers
    seconds: Floats
    bytes: Floats
    extra_s: Floats  # embedding and head
    extra_bytes: Floats
    memory_bytes: Floats  # by rank

    @classmethod
    def of(cls, seats: Sequence[PipelineSlot], placement: StagePlacement) -> "_Loads":
        held = [(rank, stage) for rank in range(len(seats)) for stage in placement.stages_of(rank)]
        ranks, stages = (np.array(column) for column in zip(*held, strict=True))
        mine = [seats[rank] for rank, _ in held]
        s = np.array([[piece.seconds / placement.num_copies for piece in seat.pieces] for seat in mine])
        b = np.array([[piece.taken_bytes(seat.in_flight) for piece in seat.pieces] for seat in mine])
        is_first, is_last = stages == 0, stages == placement.num_stages - 1

        def sums(values: Floats) -> Floats:
            return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values[:, 1:-1], axis=1)], axis=1)

        def ends(values: Floats) -> Floats:
            both: Floats = is_first * values[:, 0] + is_last * values[:, -1]
            return both

        memory = np.array([seat.memory_bytes for seat in seats])
        return cls(ranks, stages, sums(s), sums(b), extra_s=ends(s), extra_bytes=ends(b), memory_bytes=memory)

    def seconds_and_excess(self, counts: Integers) -> tuple[Floats, Floats]:
        """[layout][rank]: seconds of a microbatch, and bytes above the memory, 0 where it fits."""
        of_stage_s, of_stage_bytes = self._of_stages(counts)
        on = (self.ranks[:, None] == np.arange(len(self.memory_bytes))).astype(float)
        needed = of_stage_bytes @ on
        over = np.where(needed > self.memory_bytes * (1 + 1e-12), needed - self.memory_bytes, 0.0)
        return of_stage_s @ on, over

    def _of_stages(self, counts: Integers) -> tuple[Floats, Floats]:
        """[layout][a rank's stage]: seconds of a microbatch, and bytes."""
        ends = np.cumsum(counts, axis=1)[:, self.stages]
        starts = ends - counts[:, self.stages]
        row = np.arange(len(self.ranks))
        of_stage_s = self.seconds[row, ends] - self.seconds[row, starts] + self.extra_s
        return of_stage_s, self.bytes[row, ends] - self.bytes[row, starts] + self.extra_bytes

    def scores(self, counts: Integers) -> Floats:
        """[layout][...]: what is compared from left to right: excess, loads from the slowest, unevenness of stages."""
        seconds, excess = self.seconds_and_excess(counts)
        slowest_first = -np.sort(-seconds, axis=1)
        scale = self.seconds[:, -1].max()
        # Ranks pass work on stage by stage: of equal loads that is best whose stages take equally long.
        of_stage_s, _ = self._of_stages(counts)
        uneven = ((of_stage_s / scale) ** 2).sum(axis=1, keepdims=True)
        compared = np.concatenate([slowest_first / scale, uneven], axis=1).round(_DIGITS)
        return np.concatenate([excess.sum(axis=1, keepdims=True), compared], axis=1)


def _exchanges(counts: Integers, least: Integers) -> Integers:
    """All layouts in which one stage has a layer less and another one more: [layout][stage]."""
    able = np.flatnonzero(counts > least)
    steps = np.eye(len(counts), dtype=np.int64)
    moved: Integers = (counts - steps[able, None] + steps[None, :]).reshape(-1, len(counts))
    return moved[(moved != counts).any(axis=1)]
