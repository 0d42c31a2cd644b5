"""The sums over ranks for Adafactor, whose second moment of a matrix is a product of a mean by row and one by column
(Shazeer and Stern 2018, arXiv 1804.04235).

Rows of a matrix lie on several ranks of ZeRO's, and tensor parallel cuts its rows or its columns. Sums of squares by
row, by column, and of the weights are added up over the shards, and over tp what it cuts: columns' sums where ranks
have other rows, rows' sums where they have other columns. Then so are sums of squares of the steps, which limit them.
There is a row's number for each row of a unit, on every rank that shares it: as few as columns', and none is elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shardwright.config.model_shape import ModelShape
from shardwright.sharding.flat_buffer import FlatLayout, rows_of
from shardwright.sharding.parameter_shard import Box, ParameterShard
from shardwright.sharding.update_matrices import Range, UpdateMatrix, elements_within, update_matrices

_FLOAT32 = 4


@dataclass(frozen=True)
class FactoredMatrix:
    """A matrix of a unit: where its parameter begins in the buffer and among the rows of all parameters, and where the
    matrix begins among the columns of all matrices."""

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
    """A parameter's factor, "exp_avg_sq_row" or "exp_avg_sq_col": which box of which full tensor a rank has, and which
    numbers of the unit's these are. `is_cut` where other ranks of a tp line have others."""

    state: str
    place: ParameterShard
    full_shape: tuple[int, ...]
    box: Box
    within: Range
    is_cut: bool


@dataclass(frozen=True)
class FactoredSums:
    """The sums of a unit, of matrices, or of vectors, which have no factors; over `num_shards` of ZeRO and `num_cut` of
    tensor parallel."""

    places: tuple[ParameterShard, ...]
    matrices: tuple[FactoredMatrix, ...]
    shard_size: int
    num_shards: int
    num_cut: int
    has_factors: bool

    @classmethod
    def of(
        cls, shape: ModelShape, places: Sequence[ParameterShard], layout: FlatLayout, num_cut: int, has_factors: bool
    ) -> "FactoredSums":
        """The sums of a unit of these parameters, which lie in its buffer so."""
        by_place = [update_matrices(shape, place) for place in places]
        first_rows = accumulate((rows_of(place.shape)[0] for place in places), initial=0)
        first_columns = accumulate((m.columns for matrices in by_place for m in matrices), initial=0)
        matrices = tuple(
            FactoredMatrix(matrix, offset, first_row, next(first_columns))
            for of_place, offset, first_row in zip(by_place, layout.offsets, first_rows, strict=False)
            for matrix in of_place
        )
        return cls(tuple(places), matrices, layout.shard_size, layout.num_shards, num_cut, has_factors)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all parameters."""
        return sum(rows_of(place.shape)[0] for place in self.places) * self.has_factors

    @cached_property
    def num_columns(self) -> int:
        """Columns of all matrices."""
        return sum(one.matrix.columns for one in self.matrices) * self.has_factors

    @cached_property
    def cut_ones(self) -> list[int]:
        """The numbers of the matrices that tensor parallel cuts."""
        return [i for i, one in enumerate(self.matrices) if one.matrix.cut != "whole"] if self.num_cut > 1 else []

    def held(self, shard: int, one: FactoredMatrix) -> list[Range]:
        """The ranges of a shard's elements that a matrix has there, counted from where the shard begins."""
        start = shard * self.shard_size - one.offset
        return elements_within(one.matrix, start, start + self.shard_size)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the sums: by row and by column, of the weights and of the steps."""
        return _FLOAT32 * (self.num_rows + self.num_columns + 2 * len(self.matrices))

    @property
    def state_bytes(self) -> int:
        """Bytes of the factors."""
        return _FLOAT32 * (self.num_rows + self.num_columns)

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """The bytes summed along "shards" or "tp", alike on every rank of the line; the first time and the second."""
        number, crossing = len(self.matrices), [self.matrices[i] for i in self.cut_ones]
        of_rows = sum(one.matrix.rows for one in crossing if one.matrix.cut == "columns")
        of_columns = sum(one.matrix.columns for one in crossing if one.matrix.cut == "rows")
        rounds = [(self.num_rows + self.num_columns + number, of_rows + of_columns + len(crossing))]
        rounds = [*rounds, (number, len(crossing))] if self.has_factors else [(2 * number, 2 * len(crossing))]
        for over_shards, over_cut in rounds:
            if self.num_shards > 1:
                yield "shards", _FLOAT32 * over_shards
            if crossing:
                yield "tp", _FLOAT32 * over_cut

    def factors(self) -> Iterator[FactorBox]:
        """The factors of each parameter, as checkpoints have them: by its rows, and [experts, matrices, columns], of
        which what is no expert's has no first dim."""
        start_row = number = 0
        for place in self.places if self.has_factors else ():
            rows, columns = rows_of(place.shape)
            cuts = "tp" in place.sharded_over
            by_column = cuts and place.shape[-1] != place.full_shape[-1]
            yield FactorBox(
                "exp_avg_sq_row", place, place.full_shape[:-1], place.box[:-1], (start_row, start_row + rows),
                is_cut=cuts and not by_column,
            )  # fmt: skip
            start_row += rows
            first = self.matrices[number].first_column
            num_matrices = sum(1 for one in self.matrices[number:] if one.offset == self.matrices[number].offset)
            number += num_matrices
            experts = place.box[:1] if place.is_expert else ()
            each = num_matrices // (place.shape[0] if place.is_expert else 1)
            yield FactorBox(
                "exp_avg_sq_col", place,
                (*place.full_shape[: len(experts)], each, place.full_shape[-1]), (*experts, (0, each), place.box[-1]),
                (first, first + num_matrices * columns), is_cut=by_column,
            )  # fmt: skip
