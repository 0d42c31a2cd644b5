"""The sums over ranks for Adafactor, whose second moment of a matrix is a product of a mean by row and one by column
(Shazeer and Stern 2018, arXiv 1804.04235).

The rows of a matrix lie on several of ZeRO's ranks, and tensor parallel cuts its rows or its columns. Sums of squares
by row, by column, and of the weights are added up over the shards, and over tp if it cuts the matrix: columns' sums if
ranks have different rows, rows' sums if they have different columns. The sums of squares of the steps, which limit the
steps, are added up the same way afterwards. Every rank that shares a unit has the number of each of its rows, as it has
those of its columns: both are few, so that no rank has to fetch any.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shardwright.config.model_shape import ModelShape
from shardwright.config.units import FLOAT32_BYTES
from shardwright.sharding.flat_buffer import FlatLayout, rows_of
from shardwright.sharding.parameter_shard import Box, ParameterShard
from shardwright.sharding.update_matrices import Range, UpdateMatrix, elements_within, update_matrices


@dataclass(frozen=True)
class FactoredMatrix:
    """A matrix of a unit: the offset of its parameter in the buffer, its parameter's first row among the rows of all
    parameters, and the matrix's first column among the columns of all matrices."""

    matrix: UpdateMatrix
    offset: int
    first_row: int
    first_column: int

    @property
    def rows(self) -> list[Range]:
        """Its rows among those of all parameters."""
        return [(self.first_row + start, self.first_row + stop) for start, stop in self.matrix.ranges]

    @property
    def columns(self) -> Range:
        """Its columns among those of all matrices."""
        return self.first_column, self.first_column + self.matrix.columns


@dataclass(frozen=True)
class FactorBox:
    """A parameter's factor, "exp_avg_sq_row" or "exp_avg_sq_col": the rank's box of the full tensor, and the range
    `within` the unit's numbers. `is_cut` if the ranks of a tp line have different numbers."""

    state: str
    place: ParameterShard
    full_shape: tuple[int, ...]
    box: Box
    within: Range
    is_cut: bool


@dataclass(frozen=True)
class FactoredSums:
    """The sums of a unit of matrices, or of vectors, which have no factors; over `num_shards` ranks of ZeRO and
    `tp_size` of tensor parallel."""

    places: tuple[ParameterShard, ...]
    matrices: tuple[FactoredMatrix, ...]
    shard_size: int
    num_shards: int
    tp_size: int
    has_factors: bool

    @classmethod
    def of(
        cls, shape: ModelShape, places: Sequence[ParameterShard], layout: FlatLayout, tp_size: int, has_factors: bool
    ) -> "FactoredSums":
        """The sums of a unit of these parameters, with their layout in its buffer."""
        matrices_of_places = [update_matrices(shape, place) for place in places]
        first_rows = accumulate((rows_of(place.shape)[0] for place in places), initial=0)
        first_columns = accumulate((m.columns for matrices in matrices_of_places for m in matrices), initial=0)
        matrices = tuple(
            FactoredMatrix(matrix, offset, first_row, next(first_columns))
            for place_matrices, offset, first_row in zip(matrices_of_places, layout.offsets, first_rows, strict=False)
            for matrix in place_matrices
        )
        return cls(tuple(places), matrices, layout.shard_size, layout.num_shards, tp_size, has_factors)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all parameters."""
        return sum(rows_of(place.shape)[0] for place in self.places) * self.has_factors

    @cached_property
    def num_columns(self) -> int:
        """Columns of all matrices."""
        return sum(placed.matrix.columns for placed in self.matrices) * self.has_factors

    @cached_property
    def cut_ones(self) -> list[int]:
        """The numbers of the matrices that tensor parallel cuts."""
        if self.tp_size == 1:
            return []
        return [i for i, placed in enumerate(self.matrices) if placed.matrix.split != "whole"]

    def held(self, shard: int, placed: FactoredMatrix) -> list[Range]:
        """The ranges of a matrix's elements in a shard, counted from the beginning of the shard."""
        start = shard * self.shard_size - placed.offset
        return elements_within(placed.matrix, start, start + self.shard_size)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the sums: by row and by column, of the weights and of the steps."""
        return FLOAT32_BYTES * (self.num_rows + self.num_columns + 2 * len(self.matrices))

    @property
    def state_bytes(self) -> int:
        """Bytes of the factors."""
        return FLOAT32_BYTES * (self.num_rows + self.num_columns)

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """The bytes summed along "shards" or "tp", the same on every rank of the line: the first round, then the
        second."""
        number, crossing = len(self.matrices), [self.matrices[i] for i in self.cut_ones]
        of_rows = sum(placed.matrix.rows for placed in crossing if placed.matrix.split == "columns")
        of_columns = sum(placed.matrix.columns for placed in crossing if placed.matrix.split == "rows")
        rounds = [(self.num_rows + self.num_columns + number, of_rows + of_columns + len(crossing))]
        rounds = [*rounds, (number, len(crossing))] if self.has_factors else [(2 * number, 2 * len(crossing))]
        for over_shards, over_cut in rounds:
            if self.num_shards > 1:
                yield "shards", FLOAT32_BYTES * over_shards
            if crossing:
                yield "tp", FLOAT32_BYTES * over_cut

    def factors(self) -> Iterator[FactorBox]:
        """The factors of each parameter, as checkpoints have them: by row, and [experts, matrices, columns], without
        the first dim if the parameter is not of experts."""
        start_row = number = 0
        for place in self.places if self.has_factors else ():
            rows, columns = rows_of(place.shape)
            is_cut = "tp" in place.sharded_over
            cuts_columns = is_cut and place.shape[-1] != place.full_shape[-1]
            yield FactorBox(
                "exp_avg_sq_row",
                place,
                place.full_shape[:-1],
                place.box[:-1],
                (start_row, start_row + rows),
                is_cut=is_cut and not cuts_columns,
            )
            start_row += rows
            first_column = self.matrices[number].first_column
            num_matrices = sum(1 for placed in self.matrices[number:] if placed.offset == self.matrices[number].offset)
            number += num_matrices
            experts = place.box[:1] if place.is_expert else ()
            num_of_expert = num_matrices // (place.shape[0] if place.is_expert else 1)
            yield FactorBox(
                "exp_avg_sq_col",
                place,
                (*place.full_shape[: len(experts)], num_of_expert, place.full_shape[-1]),
                (*experts, (0, num_of_expert), place.box[-1]),
                (first_column, first_column + num_matrices * columns),
                is_cut=cuts_columns,
            )
