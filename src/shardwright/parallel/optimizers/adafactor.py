"""Adafactor: the second moment of a matrix as a product of two vectors (Shazeer and Stern 2018, arXiv 1804.04235,
algorithm 4, without momentum).

The input is gradients; those of norms and biases are already divided by the root of their second moment
(elementwise.py). The root mean square of a matrix's step is limited to 1, and then multiplied by the learning rate and
by the root mean square of the matrix's weights, which counts as at least 0.001.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.parallel.optimizers.elementwise import LEAST_SQUARE, share_of_newest
from shardwright.parallel.zero.master_weights import Masters
from shardwright.sharding.factored_sums import FactoredMatrix, FactoredSums

_LARGEST_STEP, _LEAST_WEIGHTS = 1.0, 1e-3  # root mean squares (sections 6 and 8)


class Adafactor:
    """The steps of one unit, on one rank of those that share it."""

    def __init__(self, sums: FactoredSums, zero_axis: Axis, tp: Axis) -> None:
        """`zero_axis` is the axis of ZeRO's shards, `tp` the axis over which tensor parallel shards matrices."""
        self.sums = sums
        self._zero_axis, self._tp = zero_axis, tp
        self._index = zero_axis.index if sums.num_shards > 1 else 0
        self._local_ranges = [sums.held(self._index, factored) for factored in sums.matrices]  # in this rank's shard
        self._factors: tuple[Tensor, Tensor] | None = None  # by row, by column
        self._numbers: dict[str, Tensor] = {}  # constants of all steps, on the device

    def factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Means of squares by row of all parameters, and by column of all matrices; zeros before the first step."""
        if self._factors is None:
            rows, columns = (torch.zeros(n, device=device) for n in (self.sums.num_rows, self.sums.num_columns))
            self._factors = rows, columns
        return self._factors

    def go_on_after(self, number: int, device: torch.device) -> None:
        """Continue as after `number` steps: without factors after 0 steps."""
        if number == 0:
            self._factors = None
        else:
            self.factors(device)

    def _on_device(self, name: str, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Constant numbers on the device. The host waits for their copy, in the first step only."""
        if name not in self._numbers:
            self._numbers[name] = torch.tensor(numbers, device=device)
        return self._numbers[name]

    def memory(self) -> list[Tensor]:
        """The factors."""
        return list(self._factors or ())

    @torch.no_grad()
    def __call__(self, master_weights: Sequence[Masters], scratch: Tensor) -> None:
        """Turn the gradients of the unit's shard into its steps, in place.

        Runs two all-reduces over the ZeRO axis, and over tp if it shards matrices; only one if there are only vectors.
        """
        (shard,) = master_weights
        sums, num, gradients = self.sums, len(self.sums.matrices), shard.step_buffer
        workspace = scratch[: sums.scratch_bytes].view(torch.float32).zero_()
        first_sums, step_squares = workspace.split([sums.num_rows + sums.num_columns + num, num])
        rows, columns, weight_squares = first_sums.split([sums.num_rows, sums.num_columns, num])
        for i, ranges in enumerate(self._local_ranges):
            for start, stop in ranges:
                weight_squares[i] += shard.squares(start, stop)
        if sums.has_factors:
            self._square(gradients, rows, columns)
            self._sum(first_sums, [weight_squares], self._tp_sums(rows, columns))
            self._divide(gradients, rows, columns, shard.num_steps())
        for i, ranges in enumerate(self._local_ranges):
            for start, stop in ranges:
                step_squares[i] += torch.linalg.vector_norm(gradients[start:stop]).square()
        if sums.has_factors:
            self._sum(step_squares, [step_squares])
        else:
            self._sum(workspace, [weight_squares, step_squares])
        matrix_sizes = [float(factored.matrix.full_elements) for factored in sums.matrices]
        elements = self._on_device("elements", matrix_sizes, gradients.device)
        scales = (weight_squares / elements).sqrt_().clamp_(min=_LEAST_WEIGHTS)
        scales /= (step_squares / elements).sqrt_().div_(_LARGEST_STEP).clamp_(min=1.0)
        for i, ranges in enumerate(self._local_ranges):
            for start, stop in ranges:
                gradients[start:stop].mul_(scales[i])

    def _square(self, gradients: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Add up squares, by row and by column, of the gradients in this rank's shard."""
        for factored, ranges in zip(self.sums.matrices, self._local_ranges, strict=True):
            for start, stop in ranges:
                block = gradients[start:stop].view(-1, factored.matrix.columns)
                rows[self._rows_of(factored, start, stop)] = torch.linalg.vector_norm(block, dim=1).square_()
                columns[slice(*factored.columns)] += torch.linalg.vector_norm(block, dim=0).square_()

    def _rows_of(self, factored: FactoredMatrix, start: int, stop: int) -> slice:
        """The rows, among those of all parameters, of elements [start, stop) of the shard."""
        shard_start, columns = self._index * self.sums.shard_size - factored.offset, factored.matrix.columns
        first, end = (shard_start + start) // columns, (shard_start + stop) // columns
        return slice(factored.first_row + first, factored.first_row + end)

    def _tp_sums(self, rows: Tensor, columns: Tensor) -> list[Tensor]:
        """The sums by row or column to which other ranks of tp contribute."""
        sums = []
        for factored in (self.sums.matrices[i] for i in self.sums.cut_ones):
            if factored.matrix.split == "columns":
                sums += [rows[slice(*row_range)] for row_range in factored.rows]
            else:
                sums += [columns[slice(*factored.columns)]]
        return sums

    def _divide(self, gradients: Tensor, rows: Tensor, columns: Tensor, number: int) -> None:
        """Move the factors towards the means of these sums, and divide the gradients by the root of the second moment
        that the factors give."""
        for factored in self.sums.matrices:
            columns[slice(*factored.columns)].div_(factored.matrix.full_rows)
            for row_range in factored.rows:
                rows[slice(*row_range)].div_(factored.matrix.full_columns)
        by_row, by_column = self.factors(gradients.device)
        newest = share_of_newest(number)
        by_row.lerp_(rows.add_(LEAST_SQUARE), newest)
        by_column.lerp_(columns.add_(LEAST_SQUARE), newest)
        for factored, ranges in zip(self.sums.matrices, self._local_ranges, strict=True):
            column_means = by_column[slice(*factored.columns)]
            # The mean of all squares is the mean of the row means, or of the column means. A rank has all of one kind.
            if factored.matrix.split == "rows":
                mean = column_means.mean()
            else:
                row_sums = torch.stack([by_row[slice(*row_range)].sum() for row_range in factored.rows])
                mean = row_sums.sum() / factored.matrix.full_rows
            for start, stop in ranges:
                row_means = by_row[self._rows_of(factored, start, stop)]
                block = gradients[start:stop].view(-1, factored.matrix.columns)
                block.mul_((row_means / mean).rsqrt_()[:, None]).mul_(column_means.rsqrt())

    def _sum(self, over_shards: Tensor, by_matrix: list[Tensor], tp_sums: Sequence[Tensor] = ()) -> None:
        """All-reduce `over_shards` over the shards. Then all-reduce parts of it over tp: the sums `by_matrix` of the
        matrices that tp shards, and `tp_sums`."""
        if self.sums.num_shards > 1:
            all_reduce(over_shards, self._zero_axis)
        if not self.sums.cut_ones:
            return
        chosen = self._on_device("cut ones", self.sums.cut_ones, over_shards.device)
        parts = [*tp_sums, *(matrix_sums[chosen] for matrix_sums in by_matrix)]
        totals = all_reduce(torch.cat(parts), self._tp).split([len(part) for part in parts])
        for tp_sum, total in zip(tp_sums, totals, strict=False):
            tp_sum.copy_(total)
        for matrix_sums, total in zip(by_matrix, totals[len(tp_sums) :], strict=True):
            matrix_sums[chosen] = total
