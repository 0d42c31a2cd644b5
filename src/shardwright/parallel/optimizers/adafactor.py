"""Adafactor: the second moment of a matrix as a product of two vectors (Shazeer and Stern 2018, arXiv 1804.04235,
algorithm 4, without momentum).

What comes here are gradients; of norms and biases these are already over the root of their second moment
(elementwise.py). A step's root mean square is at most 1, and it is then as large, beside the weights of its matrix, as
the learning rate says, or as of weights of 0.001.
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

    def __init__(self, sums: FactoredSums, shards: Axis, cut: Axis) -> None:
        """`shards` of ZeRO, and `cut`, the ranks that tensor parallel cuts matrices over."""
        self.sums = sums
        self._shards, self._cut = shards, cut
        self._index = shards.index if sums.num_shards > 1 else 0
        self._held = [sums.held(self._index, of) for of in sums.matrices]
        self._factors: tuple[Tensor, Tensor] | None = None  # by row, by column
        self._numbers: dict[str, Tensor] = {}  # what is the same in each step, on the device

    def factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Means of squares by row of all parameters, and by column of all matrices; zeros before the first step."""
        if self._factors is None:
            rows, columns = (torch.zeros(n, device=device) for n in (self.sums.num_rows, self.sums.num_columns))
            self._factors = rows, columns
        return self._factors

    def go_on_after(self, number: int, device: torch.device) -> None:
        """Continue as after so many steps: after none with no factors."""
        if number == 0:
            self._factors = None
        else:
            self.factors(device)

    def _once(self, name: str, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Numbers on the device: the host waits for their copy, in the first step alone."""
        if name not in self._numbers:
            self._numbers[name] = torch.tensor(numbers, device=device)
        return self._numbers[name]

    def memory(self) -> list[Tensor]:
        """The factors."""
        return list(self._factors or ())

    @torch.no_grad()
    def __call__(self, shards: Sequence[Masters], scratch: Tensor) -> None:
        """Turn the gradients of the unit's shard into its steps, in place.

        Moves two all-reduces over the shards and over tp where it cuts matrices, or one of vectors.
        """
        (shard,) = shards
        sums, num, gradients = self.sums, len(self.sums.matrices), shard.step_buffer
        memory = scratch[: sums.scratch_bytes].view(torch.float32).zero_()
        first, of_steps = memory.split([sums.num_rows + sums.num_columns + num, num])
        rows, columns, of_weights = first.split([sums.num_rows, sums.num_columns, num])
        for i, ranges in enumerate(self._held):
            for start, stop in ranges:
                of_weights[i] += shard.squares(start, stop)
        if sums.has_factors:
            self._square(gradients, rows, columns)
            self._sum(first, [of_weights], self._crossing(rows, columns))
            self._divide(gradients, rows, columns, shard.num_steps())
        for i, ranges in enumerate(self._held):
            for start, stop in ranges:
                of_steps[i] += torch.linalg.vector_norm(gradients[start:stop]).square()
        if sums.has_factors:
            self._sum(of_steps, [of_steps])
        else:
            self._sum(memory, [of_weights, of_steps])
        sizes_of_matrices = [float(of.matrix.full_elements) for of in sums.matrices]
        elements = self._once("elements", sizes_of_matrices, gradients.device)
        sizes = (of_weights / elements).sqrt_().clamp_(min=_LEAST_WEIGHTS)
        sizes /= (of_steps / elements).sqrt_().div_(_LARGEST_STEP).clamp_(min=1.0)
        for i, ranges in enumerate(self._held):
            for start, stop in ranges:
                gradients[start:stop].mul_(sizes[i])

    def _square(self, gradients: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Sums of squares, by row and by column, of what lies here."""
        for of, ranges in zip(self.sums.matrices, self._held, strict=True):
            for start, stop in ranges:
                block = gradients[start:stop].view(-1, of.matrix.columns)
                rows[self._rows_of(of, start, stop)] = torch.linalg.vector_norm(block, dim=1).square_()
                columns[slice(*of.columns)] += torch.linalg.vector_norm(block, dim=0).square_()

    def _rows_of(self, of: FactoredMatrix, start: int, stop: int) -> slice:
        """The rows of all parameters to which elements of the shard belong."""
        before, columns = self._index * self.sums.shard_size - of.offset, of.matrix.columns
        return slice(of.first_row + (before + start) // columns, of.first_row + (before + stop) // columns)

    def _crossing(self, rows: Tensor, columns: Tensor) -> list[Tensor]:
        """The sums of which other ranks of tp have a part."""
        found = []
        for of in (self.sums.matrices[i] for i in self.sums.cut_ones):
            is_by_column = of.matrix.cut == "columns"
            found += [rows[slice(*of_rows)] for of_rows in of.rows] if is_by_column else [columns[slice(*of.columns)]]
        return found

    def _divide(self, gradients: Tensor, rows: Tensor, columns: Tensor, number: int) -> None:
        """Move the factors towards the means of these sums, and divide by the root of what they say."""
        for of in self.sums.matrices:
            columns[slice(*of.columns)].div_(of.matrix.full_rows)
            for of_rows in of.rows:
                rows[slice(*of_rows)].div_(of.matrix.full_columns)
        by_row, by_column = self.factors(gradients.device)
        newest = share_of_newest(number)
        by_row.lerp_(rows.add_(LEAST_SQUARE), newest)
        by_column.lerp_(columns.add_(LEAST_SQUARE), newest)
        for of, ranges in zip(self.sums.matrices, self._held, strict=True):
            of_columns = by_column[slice(*of.columns)]
            # The mean of all squares is that of either; a rank has all columns, or all rows.
            if of.matrix.cut == "rows":
                mean = of_columns.mean()
            else:
                mean = torch.stack([by_row[slice(*of_rows)].sum() for of_rows in of.rows]).sum() / of.matrix.full_rows
            for start, stop in ranges:
                here = by_row[self._rows_of(of, start, stop)]
                block = gradients[start:stop].view(-1, of.matrix.columns)
                block.mul_((here / mean).rsqrt_()[:, None]).mul_(of_columns.rsqrt())

    def _sum(self, over_shards: Tensor, by_matrix: list[Tensor], crossing: Sequence[Tensor] = ()) -> None:
        """Sum over the shards, and then over tp what it cuts: sums `by_matrix` of the matrices that it does, and others
        that are `crossing`."""
        if self.sums.num_shards > 1:
            all_reduce(over_shards, self._shards)
        if not self.sums.cut_ones:
            return
        chosen = self._once("cut ones", self.sums.cut_ones, over_shards.device)
        parts = [*crossing, *(numbers[chosen] for numbers in by_matrix)]
        summed = all_reduce(torch.cat(parts), self._cut).split([len(part) for part in parts])
        for into, values in zip(crossing, summed, strict=False):
            into.copy_(values)
        for numbers, values in zip(by_matrix, summed[len(crossing) :], strict=True):
            numbers[chosen] = values
