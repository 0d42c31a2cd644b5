"""Uneven stages if a rank holds several: interleaved, V-shaped and bidirectional pipelines.

The sum over a rank's stages sets the pace. These stages lie apart in the model, so a recursion over the layers does not
work. Instead layers are exchanged: a stage gives one, another gets one, and those between shift. Starting from an even
layout, the best exchange is made until none helps: it reduces first the excess of memory, then the time of the slowest
rank, then of the second slowest, and so on. If layers are alike this finds the least time of the slowest rank: while
that rank has more layers than in the best layout, another has fewer, and stays faster than it with one more. If layers
differ the result is at or near the optimum (tests/planner/test_stages.py measures how near).
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
Bools = npt.NDArray[np.bool_]

_MANY = 2**8  # exchanges: of fewer, each layout is compared as soon as most are left out
_DIGITS = 9  # of loads that are compared, so that rounding does not count as progress


def best_chunks(slots: Sequence[PipelineSlot], placement: StagePlacement, num_microbatches: int) -> Stages:
    """A layout over the placement's stages whose slowest rank is fast, and that fits all memories.

    `slots` has one for each pipeline rank. NoFitError if none is found, ValueError if there are too few layers.
    """
    num_layers, num_stages = len(slots[0].pieces) - 2, placement.num_stages
    check_layers(num_layers, num_stages)
    least = np.array([int(not may_be_empty(stage, num_stages)) for stage in range(num_stages)])
    loads = _Loads.of(slots, placement)
    num_free = num_layers - int(least.sum())
    counts = least + np.diff(np.arange(num_stages + 1) * num_free // num_stages)  # nearly equal parts
    _, score = loads.best(counts[None])
    while True:
        givers, takers = _exchanges(counts, least)
        if loads.are_alike and len(givers) > _MANY:
            is_fastest = loads.are_fastest(counts, givers, takers)
            givers, takers = givers[is_fastest], takers[is_fastest]
        neighbours = np.repeat(counts[None], len(givers), axis=0)
        neighbours[np.arange(len(givers)), givers] -= 1
        neighbours[np.arange(len(givers)), takers] += 1
        if not len(neighbours):
            break
        best, best_score = loads.best(neighbours)
        if not best_score < score:
            break
        counts, score = neighbours[best], best_score
    excess = loads.seconds_and_excess(counts[None])[1][0]
    if excess.max() > 0:
        raise NoFitError(int(excess.argmax()), float(excess.max()), num_layers, num_stages)
    return stages_of(tuple(map(int, counts)), slots, placement, num_microbatches)


@dataclass(frozen=True)
class _Loads:
    """Running sums over the layers, [a rank's stage][layers before], for each stage that a rank holds."""

    ranks: Integers  # [rank's stage], ascending; each holds as many stages
    stages: Integers
    seconds: Floats
    bytes: Floats
    extra_s: Floats  # embedding and head
    extra_bytes: Floats
    memory_bytes: Floats  # by rank
    are_alike: bool  # all layers of a slot take as long, and as many bytes

    @classmethod
    def of(cls, slots: Sequence[PipelineSlot], placement: StagePlacement) -> "_Loads":
        rank_stages = [(rank, stage) for rank in range(len(slots)) for stage in placement.stages_of(rank)]
        ranks, stages = (np.array(column) for column in zip(*rank_stages, strict=True))
        stage_slots = [slots[rank] for rank, _ in rank_stages]
        piece_s = np.array([[piece.seconds / placement.num_copies for piece in slot.pieces] for slot in stage_slots])
        piece_bytes = np.array([[piece.taken_bytes(slot.in_flight) for piece in slot.pieces] for slot in stage_slots])
        is_first, is_last = stages == 0, stages == placement.num_stages - 1

        def sums(values: Floats) -> Floats:
            return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values[:, 1:-1], axis=1)], axis=1)

        def ends(values: Floats) -> Floats:
            end_values: Floats = is_first * values[:, 0] + is_last * values[:, -1]
            return end_values

        memory = np.array([slot.memory_bytes for slot in slots])
        return cls(
            ranks,
            stages,
            sums(piece_s),
            sums(piece_bytes),
            extra_s=ends(piece_s),
            extra_bytes=ends(piece_bytes),
            memory_bytes=memory,
            are_alike=all(np.ptp(values[:, 1:-1], axis=1).max() == 0 for values in (piece_s, piece_bytes)),
        )

    def seconds_and_excess(self, counts: Integers) -> tuple[Floats, Floats]:
        """Seconds of a microbatch, and bytes above the memory, 0 if it fits; both by [layout][rank]."""
        return self._on_ranks(*self._of_stages(counts))

    def _on_ranks(self, stage_s: Floats, stage_bytes: Floats) -> tuple[Floats, Floats]:
        # Not as a product with a matrix of zeros and ones: the threads of such a product wait for each other, busily.
        by_rank = (-1, len(self.memory_bytes), len(self.ranks) // len(self.memory_bytes))
        rank_s, rank_bytes = (_sum_of_last(values.reshape(by_rank)) for values in (stage_s, stage_bytes))
        return rank_s, np.where(rank_bytes > self.memory_bytes * (1 + 1e-12), rank_bytes - self.memory_bytes, 0.0)

    def _of_stages(self, counts: Integers) -> tuple[Floats, Floats]:
        """Seconds of a microbatch, and bytes; both by [layout][a rank's stage]."""
        if self.are_alike:  # several times as fast
            numbers = counts.take(self.stages, axis=1)
            stage_s, stage_bytes = numbers * self.seconds[:, 1], numbers * self.bytes[:, 1]
            return stage_s + self.extra_s, stage_bytes + self.extra_bytes
        first_sums = np.arange(len(self.ranks)) * self.seconds.shape[1]
        ends = np.cumsum(counts, axis=1)[:, self.stages] + first_sums
        starts = ends - counts[:, self.stages]
        stage_s = self.seconds.take(ends) - self.seconds.take(starts) + self.extra_s
        return stage_s, self.bytes.take(ends) - self.bytes.take(starts) + self.extra_bytes

    def are_fastest(self, counts: Integers, givers: Integers, takers: Integers) -> Bools:
        """Mask of the exchanges that fit and after which the slowest rank is the fastest of all, and the fewest ranks
        are as slow; of every exchange if none fits, or if the layout does not. Layers are alike.

        An exchange changes only the ranks that hold one of its two stages, so no other load is computed anew.
        """
        num_ranks, num_copies = len(self.memory_bytes), len(self.ranks) // len(counts)
        num = len(self.ranks) // num_ranks  # stages of a rank
        place = np.full((len(counts), num_ranks), -1)  # of a stage on a rank, -1 if it is not there
        place[self.stages, self.ranks] = np.tile(np.arange(num), num_ranks)
        by_rank, one = counts[self.stages].reshape(num_ranks, 1, 1, num), np.eye(num, dtype=np.int64)
        numbers = by_rank, by_rank - one[:, None], by_rank + one, by_rank - one[:, None] + one
        (rank_s, less, more, both), (rank_bytes, _, more_bytes, both_bytes) = (
            [_sum_of_last(n * loads[:, 1].reshape(shape) + extra.reshape(shape)) for n in numbers]
            for shape in [(num_ranks, 1, 1, num)]
            for loads, extra in ((self.seconds, self.extra_s), (self.bytes, self.extra_bytes))
        )
        room = (self.memory_bytes * (1 + 1e-12))[:, None, None]
        rank_s, less = rank_s[:, 0, 0], less[:, :, 0]
        more, both = (np.where(b > room, np.inf, s) for s, b in ((more, more_bytes), (both, both_bytes)))
        holders = self.ranks[np.argsort(self.stages, kind="stable")].reshape(-1, num_copies)
        changed = []  # (rank, its new seconds; 0 if another entry has the same rank)
        for of_giver, of_taker in zip(holders[givers].T, holders[takers].T, strict=True):
            given, taken = place[givers, of_giver], place[takers, of_giver]
            changed.append((of_giver, np.where(taken < 0, less[of_giver, given], both[of_giver, given, taken])))
            is_apart = place[givers, of_taker] < 0
            changed.append((of_taker, np.where(is_apart, more[of_taker, 0, place[takers, of_taker]], 0.0)))
        slowest = np.max([new_s for _, new_s in changed], axis=0)
        for rank in np.argsort(-rank_s)[: 2 * num_copies + 1].tolist():  # an exchange changes one less
            is_unchanged = (place[givers, rank] < 0) & (place[takers, rank] < 0)
            slowest = np.maximum(slowest, np.where(is_unchanged, rank_s[rank], 0.0))
        if np.isinf(slowest.min(initial=np.inf)) or (rank_bytes > room).any():
            return np.ones(len(givers), bool)
        scale = self.seconds[:, -1].max()
        scaled = (slowest / scale).round(_DIGITS)
        # Of equal ones those are better after which fewer ranks are as slow.
        are_slow = (rank_s / scale).round(_DIGITS) == scaled.min()
        more_slow = sum(
            ((new_s / scale).round(_DIGITS) == scaled.min()).astype(int) - (are_slow[rank] & (new_s > 0))
            for rank, new_s in changed
        )
        more_slow = np.where(scaled == scaled.min(), more_slow, len(rank_s))
        return np.asarray(more_slow == more_slow.min())

    def best(self, counts: Integers) -> tuple[int, tuple[float, ...]]:
        """The first of the layouts with the lowest score, and that score, whose numbers are compared from left to
        right: excess, loads from the slowest on, unevenness of stages."""
        stage_s, stage_bytes = self._of_stages(counts)
        seconds, excess = self._on_ranks(stage_s, stage_bytes)
        scale, excess_bytes = self.seconds[:, -1].max(), excess.sum(axis=1)
        # Few layouts have the least excess and then the fastest slowest rank: only these need the rest of the score.
        indices = np.flatnonzero(excess_bytes == excess_bytes.min())
        slowest = (seconds[indices].max(axis=1) / scale).round(_DIGITS)
        indices = indices[slowest == slowest.min()]
        slowest_first = -np.sort(-seconds[indices], axis=1)
        # Ranks pass work on stage by stage: among equal loads, stages that take equally long are best.
        uneven = ((stage_s[indices] / scale) ** 2).sum(axis=1, keepdims=True)
        compared = np.concatenate([slowest_first / scale, uneven], axis=1).round(_DIGITS)
        scores = np.concatenate([excess_bytes[indices, None], compared], axis=1)
        first = np.lexsort(scores.T[::-1])[0]
        return int(indices[first]), tuple(scores[first])


def _sum_of_last(values: Floats) -> Floats:
    """Sums over a short last axis, in its order."""
    total = values[..., 0].copy()
    for index in range(1, values.shape[-1]):
        total += values[..., index]
    return total


def _exchanges(counts: Integers, least: Integers) -> tuple[Integers, Integers]:
    """(the stage that has a layer less, another that has one more) of every exchange."""
    givers, takers = np.meshgrid(np.flatnonzero(counts > least), np.arange(len(counts)), indexing="ij")
    differ = givers != takers
    return givers[differ], takers[differ]
