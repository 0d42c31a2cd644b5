"""Muon: steps of matrices are made orthogonal (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).

The input is the momentum of a shard's elements (elementwise.py). Its rows are sent to the owners of their matrices,
which make these orthogonal, and the results are sent back (sharding/matrix_exchange.py). Each step is scaled by 0.2
times the root of the longer side. Then its elements are as large as those of AdamW's steps (section 2.2 of Liu et al.),
so both optimizers can share a learning rate and a weight decay.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, start_all_to_all_v
from shardwright.parallel.zero.master_weights import Masters
from shardwright.sharding.matrix_exchange import ALL_TP_RANKS, MatrixExchange, PlacedMatrix

_ROOT_MEAN_SQUARE = 0.2
# Coefficients of the odd polynomial a x + b x^3 + c x^5 that each step of a Newton-Schulz iteration applies to singular
# values: it is steep at 0, and the result is only about one (Jordan et al. 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7

Piece = tuple[int, int]  # (start, stop) in a region of memory


@dataclass(frozen=True)
class _Rows:
    """Rows in the shard of a unit: its elements [start, stop). They are sent from `position` in a send buffer; their
    steps are multiplied by `scale`."""

    unit: int
    start: int
    stop: int
    position: int
    scale: float


@dataclass(frozen=True)
class _MatrixShard:
    """The shard of a matrix on this tp rank: the pieces in which its elements arrived, in order. If it is sent on over
    tp, it is sent from `position` in a send buffer."""

    placed: PlacedMatrix
    pieces: tuple[Piece, ...]
    position: int = 0

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.placed.matrix.num_elements


class Muon:
    """The steps of the matrices of some units, on one rank of those that share them."""

    def __init__(
        self, exchange: MatrixExchange, zero_axis: Axis, tp: Axis, dtype: torch.dtype, newton_schulz_steps: int
    ) -> None:
        """`zero_axis` is the axis of ZeRO's shards, `tp` the axis over which tensor parallel shards matrices. Matrices
        are sent and made orthogonal in the number type `dtype`."""
        self._exchange, self._zero_axis, self._tp = exchange, zero_axis, tp
        self._dtype, self._newton_schulz_steps = dtype, newton_schulz_steps
        self._index = zero_axis.index if exchange.num_shards > 1 else 0
        self._rows, self._sent_sizes = self._rows_to_send()
        self._whole_parts, self._parts_by_tp_owner, self._received_sizes = self._parts_to_receive()

    def memory(self) -> list[Tensor]:
        """No tensors: momentum is kept for each element, elsewhere."""
        return []

    def go_on_after(self, number: int, device: torch.device) -> None:
        """Nothing: there is no state."""

    def _rows_to_send(self) -> tuple[list[_Rows], list[int]]:
        """This shard's rows, in the order of their owners; and the number of elements for each owner."""
        rows, sizes, position = [], [], 0
        for owner in range(self._exchange.num_shards):
            owner_start = position
            for placed in self._exchange.owned_parts(owner):
                longer = max(placed.matrix.full_rows, placed.matrix.full_columns)
                for start, stop in self._exchange.held(self._index, placed):
                    rows.append(_Rows(placed.unit, start, stop, position, _ROOT_MEAN_SQUARE * math.sqrt(longer)))
                    position += stop - start
            sizes.append(position - owner_start)
        return rows, sizes

    def _parts_to_receive(self) -> tuple[list[_MatrixShard], list[list[_MatrixShard]], list[int]]:
        """The parts that this rank receives: those of matrices that are complete here, and those that it sends on over
        tp, by their owner there; and the number of elements from each shard."""
        exchange, position = self._exchange, 0
        pieces: dict[int, list[Piece]] = {}
        sizes = []
        for shard in range(exchange.num_shards):
            shard_start = position
            for number, placed in enumerate(exchange.owned_parts(self._index)):
                size = exchange.num_held(shard, placed)
                if size:
                    pieces.setdefault(number, []).append((position, position + size))
                position += size
            sizes.append(position - shard_start)
        parts = [_MatrixShard(p, tuple(pieces[number])) for number, p in enumerate(exchange.owned_parts(self._index))]
        if not exchange.uses_tp_exchange:
            return parts, [], sizes
        by_tp_owner, position = list[list[_MatrixShard]](), 0
        for index in range(exchange.tp_size):
            by_tp_owner.append([])
            for part in parts:
                if part.placed.tp_owner == index:
                    by_tp_owner[-1].append(_MatrixShard(part.placed, part.pieces, position))
                    position += part.size
        return [part for part in parts if part.placed.tp_owner == ALL_TP_RANKS], by_tp_owner, sizes

    @torch.no_grad()
    def __call__(self, master_weights: Sequence[Masters], scratch: Tensor) -> None:
        """Turn the momentum of the units' shards into their steps, in place.

        Runs two all-to-alls over the ZeRO axis, and two over tp if it shards matrices.
        """
        workspace = scratch[: self._exchange.scratch_bytes].view(self._dtype)
        send_buffer, receive_buffer, tp_send_buffer, tp_receive_buffer, work = workspace.split(self._exchange.regions)
        for rows in self._rows:
            momentum = master_weights[rows.unit].step_buffer[rows.start : rows.stop]
            send_buffer[rows.position : rows.position + rows.stop - rows.start].copy_(momentum)
        parts = send_buffer
        if self._exchange.num_shards > 1:
            parts = receive_buffer
            _exchange(receive_buffer, self._received_sizes, send_buffer, self._sent_sizes, self._zero_axis)
        for part in self._whole_parts:
            self._orthogonalise_in_place(part.placed, [parts[start:stop] for start, stop in part.pieces], work)
        if self._exchange.uses_tp_exchange:
            self._make_steps_over_tp(parts, tp_send_buffer, tp_receive_buffer, work)
        if self._exchange.num_shards > 1:
            _exchange(send_buffer, self._sent_sizes, receive_buffer, self._received_sizes, self._zero_axis)
        for rows in self._rows:
            steps = send_buffer[rows.position : rows.position + rows.stop - rows.start]
            master_weights[rows.unit].step_buffer[rows.start : rows.stop].copy_(steps).mul_(rows.scale)

    def _make_steps_over_tp(self, parts: Tensor, send_buffer: Tensor, receive_buffer: Tensor, work: Tensor) -> None:
        """Send shards of matrices over tp. The owners assemble the whole matrices, orthogonalise them, and send the
        results back."""
        for start, stop, position in self._copies():
            send_buffer[position : position + stop - start].copy_(parts[start:stop])
        own_parts = self._parts_by_tp_owner[self._tp.index]
        sent_sizes = [sum(part.size for part in owner_parts) for owner_parts in self._parts_by_tp_owner]
        size = sum(part.size for part in own_parts)
        received_sizes = [size] * self._tp.size
        _exchange(receive_buffer, received_sizes, send_buffer, sent_sizes, self._tp)
        offset = 0
        for part in own_parts:
            starts = [rank * size + offset for rank in range(self._tp.size)]
            self._orthogonalise_in_place(
                part.placed, [receive_buffer[start : start + part.size] for start in starts], work
            )
            offset += part.size
        _exchange(send_buffer, sent_sizes, receive_buffer, received_sizes, self._tp)
        for start, stop, position in self._copies():
            parts[start:stop].copy_(send_buffer[position : position + stop - start])

    def _copies(self) -> Iterator[tuple[int, int, int]]:
        """The pieces of parts that are sent on over tp: (start, stop, position in the send buffer)."""
        for part in (part for owner_parts in self._parts_by_tp_owner for part in owner_parts):
            position = part.position
            for start, stop in part.pieces:
                yield start, stop, position
                position += stop - start

    def _orthogonalise_in_place(self, placed: PlacedMatrix, pieces: Sequence[Tensor], work: Tensor) -> None:
        """Make a matrix orthogonal, in place. It lies in pieces: ranges of rows in order, or the columns of each rank
        of tp."""
        matrix = placed.matrix
        is_by_columns = matrix.split == "columns" and placed.tp_owner != ALL_TP_RANKS

        def split(full: Tensor) -> list[Tensor]:
            if is_by_columns:
                return list(full.split(matrix.columns, dim=1))
            return list(full.split([piece.numel() // matrix.full_columns for piece in pieces]))

        def fill(full: Tensor) -> None:
            for part, piece in zip(split(full), pieces, strict=True):
                part.copy_(piece.view(part.shape))

        step = orthogonalise(matrix.full_rows, matrix.full_columns, fill, self._newton_schulz_steps, work)
        for part, piece in zip(split(step), pieces, strict=True):
            piece.view(part.shape).copy_(part)


def _exchange(out: Tensor, out_sizes: list[int], x: Tensor, x_sizes: list[int], axis: Axis) -> None:
    start_all_to_all_v(out[: sum(out_sizes)], x[: sum(x_sizes)], axis, out_sizes, x_sizes).wait()


@torch.no_grad()
def orthogonalise(rows: int, columns: int, fill: Callable[[Tensor], None], steps: int, work: Tensor) -> Tensor:
    """The matrix [rows, columns] that `fill` writes, made orthogonal: a Newton-Schulz iteration makes its singular
    values about one, and keeps its singular vectors (Bernstein and Newhouse 2024, arXiv 2409.20325). It lies in `work`:
    memory in its number type, for two such matrices and two square matrices of the short side."""
    is_tall = rows > columns
    short, long = min(rows, columns), max(rows, columns)
    x, y = (work[i * short * long :][: short * long].view(short, long) for i in range(2))
    squares, sums = (work[2 * short * long + i * short * short :][: short * short].view(short, short) for i in range(2))
    fill(x.T if is_tall else x)
    x.div_(torch.linalg.vector_norm(x).clamp_(min=_LEAST_NORM))
    for _ in range(steps):
        torch.mm(x, x.T, out=squares)
        torch.addmm(squares, squares, squares, beta=_B, alpha=_C, out=sums)
        torch.addmm(x, sums, x, beta=_A, out=y)
        x, y = y, x
    return x.T if is_tall else x
