"""Muon: steps of matrices are made orthogonal (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).

What comes here is the momentum of a shard's elements (elementwise.py). Its rows travel to the owners of their matrices,
which make these orthogonal, and what they made comes back (sharding/matrix_exchange.py). Each step is scaled by 0.2
times the root of the longer side, after which its elements are as large as those of AdamW's steps (section 2.2 of Liu
et al.): so both share a learning rate and a weight decay.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, start_all_to_all_v
from shardwright.parallel.optimizers.newton_schulz import orthogonalise
from shardwright.parallel.zero.master_weights import Masters
from shardwright.sharding.matrix_exchange import EVERY, MatrixExchange, PlacedMatrix

_ROOT_MEAN_SQUARE = 0.2

Piece = tuple[int, int]  # of a region of memory


@dataclass(frozen=True)
class _Rows:
    """Rows of the shard of a unit, from and to element numbers of it, and where they lie as they travel; `scale` is of
    steps."""

    unit: int
    start: int
    stop: int
    at: int
    scale: float


@dataclass(frozen=True)
class _OwnedRows:
    """The part of a matrix that this rank's place on the tp line has: the pieces that its rows came in, one after the
    other, and, where it goes on along tp, where it lies then."""

    placed: PlacedMatrix
    pieces: tuple[Piece, ...]
    at: int = 0

    @property
    def size(self) -> int:
        """Elements of it."""
        return self.placed.matrix.num_elements


class Muon:
    """The steps of the matrices of some units, on one rank of those that share them."""

    def __init__(self, exchange: MatrixExchange, shards: Axis, cut: Axis, number: torch.dtype, steps: int) -> None:
        """`shards` of ZeRO, and `cut`, the ranks that tensor parallel cuts matrices over; matrices travel and are made
        orthogonal in the number type `number`, by so many `steps`."""
        self._exchange, self._shards, self._cut = exchange, shards, cut
        self._number, self._steps = number, steps
        self._index = shards.index if exchange.num_shards > 1 else 0
        self._rows, self._leave = self._leaving()
        self._whole, self._crossing, self._arrive = self._arriving()

    def memory(self) -> list[Tensor]:
        """Nothing: momentum is by element."""
        return []

    def go_on_after(self, number: int, device: torch.device) -> None:
        """There is nothing to remember."""

    def _leaving(self) -> tuple[list[_Rows], list[int]]:
        """This shard's rows, as they leave it, by owner; and elements for each owner."""
        rows, sizes, at = [], [], 0
        for owner in range(self._exchange.num_shards):
            before = at
            for placed in self._exchange.owned_parts(owner):
                longer = max(placed.matrix.full_rows, placed.matrix.full_columns)
                for start, stop in self._exchange.held(self._index, placed):
                    rows.append(_Rows(placed.unit, start, stop, at, _ROOT_MEAN_SQUARE * math.sqrt(longer)))
                    at += stop - start
            sizes.append(at - before)
        return rows, sizes

    def _arriving(self) -> tuple[list[_OwnedRows], list[list[_OwnedRows]], list[int]]:
        """The parts that come here: of matrices that need no more, and of those that go on along tp, by their owner
        there; and elements from each shard."""
        exchange, at = self._exchange, 0
        pieces: dict[int, list[Piece]] = {}
        sizes = []
        for shard in range(exchange.num_shards):
            before = at
            for number, placed in enumerate(exchange.owned_parts(self._index)):
                held = exchange.num_held(shard, placed)
                if held:
                    pieces.setdefault(number, []).append((at, at + held))
                at += held
            sizes.append(at - before)
        parts = [_OwnedRows(p, tuple(pieces[number])) for number, p in enumerate(exchange.owned_parts(self._index))]
        if not exchange.crosses:
            return parts, [], sizes
        crossing, at = list[list[_OwnedRows]](), 0
        for index in range(exchange.num_cut):
            crossing.append([])
            for part in parts:
                if part.placed.cut_index == index:
                    crossing[-1].append(_OwnedRows(part.placed, part.pieces, at))
                    at += part.size
        return [part for part in parts if part.placed.cut_index == EVERY], crossing, sizes

    @torch.no_grad()
    def __call__(self, shards: Sequence[Masters], scratch: Tensor) -> None:
        """Turn the momentum of the units' shards into their steps, in place.

        Moves two all-to-alls over the shards, and two over tp where that cuts matrices.
        """
        memory = scratch[: self._exchange.scratch_bytes].view(self._number)
        rows, arrived, leaving, whole, work = memory.split(self._exchange.regions)
        for held in self._rows:
            rows[held.at : held.at + held.stop - held.start].copy_(
                shards[held.unit].step_buffer[held.start : held.stop]
            )
        parts = rows
        if self._exchange.num_shards > 1:
            parts = arrived
            _exchange(arrived, self._arrive, rows, self._leave, self._shards)
        for part in self._whole:
            self._make(part.placed, [parts[start:stop] for start, stop in part.pieces], work)
        if self._exchange.crosses:
            self._cross(parts, leaving, whole, work)
        if self._exchange.num_shards > 1:
            _exchange(rows, self._leave, arrived, self._arrive, self._shards)
        for held in self._rows:
            made = rows[held.at : held.at + held.stop - held.start]
            shards[held.unit].step_buffer[held.start : held.stop].copy_(made).mul_(held.scale)

    def _cross(self, parts: Tensor, leaving: Tensor, whole: Tensor, work: Tensor) -> None:
        """Parts go to their owners along tp, which make whole matrices of them, and come back."""
        for start, stop, at in self._copies():
            leaving[at : at + stop - start].copy_(parts[start:stop])
        mine = self._crossing[self._cut.index]
        there, size = [sum(part.size for part in of) for of in self._crossing], sum(part.size for part in mine)
        here = [size] * self._cut.size
        _exchange(whole, here, leaving, there, self._cut)
        at = 0
        for part in mine:
            slices = [slice(rank * size + at, rank * size + at + part.size) for rank in range(self._cut.size)]
            self._make(part.placed, [whole[of] for of in slices], work)
            at += part.size
        _exchange(leaving, there, whole, here, self._cut)
        for start, stop, at in self._copies():
            parts[start:stop].copy_(leaving[at : at + stop - start])

    def _copies(self) -> Iterator[tuple[int, int, int]]:
        """The pieces of parts that cross, and where each lies as they do."""
        for part in (part for of in self._crossing for part in of):
            at = part.at
            for start, stop in part.pieces:
                yield start, stop, at
                at += stop - start

    def _make(self, placed: PlacedMatrix, pieces: Sequence[Tensor], work: Tensor) -> None:
        """Make a matrix orthogonal, in place, that lies in pieces: rows one after the other, or the columns of each
        rank of tp."""
        matrix = placed.matrix
        is_beside = matrix.cut == "columns" and placed.cut_index != EVERY

        def among(whole: Tensor) -> list[Tensor]:
            if is_beside:
                return list(whole.split(matrix.columns, dim=1))
            return list(whole.split([piece.numel() // matrix.full_columns for piece in pieces]))

        def fill(whole: Tensor) -> None:
            for part, piece in zip(among(whole), pieces, strict=True):
                part.copy_(piece.view(part.shape))

        made = orthogonalise(matrix.full_rows, matrix.full_columns, fill, self._steps, work)
        for part, piece in zip(among(made), pieces, strict=True):
            piece.view(part.shape).copy_(part)


def _exchange(out: Tensor, out_sizes: list[int], x: Tensor, x_sizes: list[int], axis: Axis) -> None:
    start_all_to_all_v(out[: sum(out_sizes)], x[: sum(x_sizes)], axis, out_sizes, x_sizes).wait()
