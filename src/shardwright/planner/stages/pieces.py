"""The pieces of a pipeline, the slots of its stages, and the cost of a layout.

Pieces are the embedding, the layers and the head with the loss, in this order. A layout is the number of layers of each
stage; the first stage has the embedding too, and the last the head. A slot is one pipeline rank: the costs of pieces on
its device, its memory, and the microbatches in flight there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, zip_longest

import numpy as np

from shardwright.config.phrase import say
from shardwright.layers.arrays import Array
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class Piece:
    """The embedding, a layer, or the head, on one kind of device: seconds of one microbatch, and bytes.

    `kept_bytes` are for each microbatch in flight, from forward to backward; `held_bytes` exist once: parameters,
    gradients, optimizer state.
    """

    forward_s: float
    backward_s: float
    kept_bytes: float = 0.0
    held_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def taken_bytes(self, in_flight: float) -> float:
        """Bytes with `in_flight` microbatches in flight."""
        return self.held_bytes + in_flight * self.kept_bytes


@dataclass(frozen=True)
class PipelineSlot:
    """A pipeline rank: the costs of the pieces on its device, the memory that they may take there, and the number of
    microbatches in flight there, counted in microbatches of all of the rank's layers."""

    pieces: Sequence[Piece]
    memory_bytes: float = math.inf
    in_flight: float = 1.0

    @cached_property
    def piece_s(self) -> list[float]:
        """The seconds of each piece."""
        return [piece.seconds for piece in self.pieces]

    @cached_property
    def piece_bytes(self) -> list[float]:
        """The bytes of each piece with the microbatches in flight."""
        return [piece.taken_bytes(self.in_flight) for piece in self.pieces]

    def load(self, stages: tuple[range, ...]) -> tuple[float, float]:
        """Seconds of a microbatch in some stages, and their bytes; computed once for equal stages, since most ranks
        hold equal ones in all layouts that are compared."""
        if stages not in self._loads:
            parts = [slice(stage.start, stage.stop) for stage in stages]
            seconds = sum(chain.from_iterable(self.piece_s[part] for part in parts))
            self._loads[stages] = seconds, sum(chain.from_iterable(self.piece_bytes[part] for part in parts))
        return self._loads[stages]

    @cached_property
    def _loads(self) -> dict[tuple[range, ...], tuple[float, float]]:
        return {}


@dataclass(frozen=True)
class Stages:
    """A layout with its costs. `rank_s` are seconds of one microbatch, forward and backward; `rank_bytes` those of
    pieces."""

    layout: tuple[int, ...]
    rank_s: tuple[float, ...]
    rank_bytes: tuple[float, ...]
    pipeline_s: float  # all microbatches through all stages

    @property
    def imbalance(self) -> float:
        """The time of the slowest rank over that of the mean rank, minus 1: 0 if all are equal."""
        return max(self.rank_s) * len(self.rank_s) / sum(self.rank_s) - 1


def pipeline_s(rank_s: Sequence[float], num_microbatches: int, chunks: int = 1) -> float:
    """Seconds of a step: the slowest rank sets the pace, and the others are passed once.

    With one chunk a rank this is the sum of the stages plus (m - 1) times the slowest: Zheng et al. 2022 (Alpa, arXiv
    2201.12023, section 5.2, equation 2). With several chunks a rank, only one chunk of each other rank is passed.
    """
    slowest = max(rank_s)
    return num_microbatches * slowest + (sum(rank_s) - slowest) / chunks


def stages_of(
    layout: Sequence[int], slots: Sequence[PipelineSlot], placement: StagePlacement, num_microbatches: int
) -> Stages:
    """The cost of a layout, with a slot for each pipeline rank. ValueError if the layout does not place all layers."""
    pieces = layout_pieces(layout, len(slots[0].pieces) - 2)
    copies, chunks = placement.num_copies, len(placement.stages_of(0))
    rank_s, rank_bytes = [], []
    for rank, slot in enumerate(slots):
        seconds, num_bytes = slot.load(tuple(pieces[stage] for stage in placement.stages_of(rank)))
        rank_s.append(seconds / copies)  # with two copies in opposite directions, a microbatch passes one of them
        rank_bytes.append(num_bytes)
    return Stages(tuple(layout), tuple(rank_s), tuple(rank_bytes), pipeline_s(rank_s, num_microbatches, chunks))


def rank_seconds(layouts: Array, slot: PipelineSlot, placement: StagePlacement) -> Array:
    """Seconds of one microbatch on each pipeline rank under many layouts, (layouts, ranks), as `stages_of` has them.

    `layouts` has the layers of each stage, (layouts, stages); all ranks are alike.
    """
    ends = 1 + np.cumsum(layouts, axis=1)
    starts = np.hstack([np.zeros((len(ends), 1), np.int64), ends[:, :-1]])
    ends[:, -1] += 1
    counts, nothing = ends - starts, len(slot.piece_s)
    piece_s = np.array([*slot.piece_s, 0.0])
    seconds = np.zeros((len(layouts), placement.num_ranks))
    by_chunk = zip_longest(*map(placement.stages_of, range(placement.num_ranks)), fillvalue=-1)
    for stages in map(list, by_chunk):
        first, count = starts[:, stages], counts[:, stages] * (np.array(stages) >= 0)
        for number in range(int(count.max(initial=0))):  # one piece after the other, as a sum over a list adds them
            seconds += piece_s[np.where(number < count, first + number, nothing)]
    return np.asarray(seconds / placement.num_copies)  # with two copies, a microbatch passes one of them


def layout_pieces(layout: Sequence[int], num_layers: int) -> list[range]:
    """The pieces of each stage, as indices of the list of pieces."""
    if sum(layout) != num_layers:
        raise ValueError(
            say(
                "a layout of {layout} = {placed} layers for {num_layers}",
                layout=" + ".join(map(str, layout)),
                placed=sum(layout),
                num_layers=num_layers,
            )
        )
    ends = [1 + end for end in accumulate(layout)]
    starts = [0, *ends[:-1]]
    ends[-1] += 1
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def may_be_empty(stage: int, num_stages: int) -> bool:
    """True if a stage may have no layers: the first has the embedding, the last the head (config/checks/check.py)."""
    return stage in (0, num_stages - 1)
