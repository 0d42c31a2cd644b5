"""Who makes a whole matrix orthogonal, and what travels to it and back: Muon under ZeRO and tensor parallel.

Newton-Schulz needs a whole matrix, and takes some 30 h FLOPs an element of an h x h one: for h = 4,096 as many as
training on 20,000 tokens. So each matrix has one owner, by its cost the one with least to do so far; ranks send it
their rows, and it sends back the rows of what it made. Each element goes there and back once along the line of ZeRO's
shards, and once more along the line of tensor parallel where that cuts the matrix. To gather all matrices on all ranks
would move as much, and every rank would do the work of all.

A unit may have fewer matrices than there are ranks. So neighbouring units are exchanged together, as many as have about
three matrices for each rank that may own one (`exchanged_together`): enough to share the work out evenly, and as little
memory as some matrices take on each rank.

    shards    rows of a rank's shard         ->  the part of each matrix that the owner's place on the tp line has
    tp        parts of whole matrices        ->  whole matrices, on their owners
    back      the same ways, in reverse order

Where a replica holds the whole state, without ZeRO, it does all of it itself, as it does all of any other update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, groupby

from shardwright.config.model_shape import ModelShape
from shardwright.sharding.flat_buffer import FlatLayout
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.update_matrices import Range, UpdateMatrix, elements_within, update_matrices

MATRICES_EACH = 3  # about, for each rank that may own one, of those that are exchanged together
_ALIGNED = 64  # elements: where pieces of memory begin

PlacedUnit = tuple[Sequence[ParameterShard], FlatLayout]

EVERY = -1  # index on the tp line of an owner, where each rank of it has the whole matrix


def orthogonal_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of Newton-Schulz, of so many steps: two products with the short side squared, and one of squares."""
    short, long = min(rows, columns), max(rows, columns)
    return steps * (4 * short * short * long + 2 * short**3)


def aligned_to(num_elements: int) -> int:
    """Elements of a piece of memory after which another one begins."""
    return -(-num_elements // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix of one of some units: where its parameter begins in the buffer of that, and who owns it, by place among
    the shards and on the tp line."""

    matrix: UpdateMatrix
    unit: int
    offset: int
    shard: int
    cut_index: int


@dataclass(frozen=True)
class MatrixExchange:
    """The matrices of units, with the sizes of their shards, and the ranks that share them: `num_shards` of ZeRO,
    `num_cut` of tensor parallel. `itemsize` is bytes of an element that travels, which is computed with."""

    matrices: tuple[PlacedMatrix, ...]
    shard_sizes: tuple[int, ...]
    num_shards: int
    num_cut: int
    itemsize: int

    @classmethod
    def of(cls, shape: ModelShape, units: Sequence[PlacedUnit], num_cut: int, itemsize: int) -> "MatrixExchange":
        """The exchange of units of these parameters, which lie in their buffers so."""
        num_shards = units[0][1].num_shards
        exchanges = [
            (matrix, unit, offset)
            for unit, (places, layout) in enumerate(units)
            for place, offset in zip(places, layout.offsets, strict=True)
            for matrix in update_matrices(shape, place)
        ]
        costs = [orthogonal_flops(matrix.full_rows, matrix.full_columns, 1) for matrix, _, _ in exchanges]
        # The shard with least to do, and there the rank of the tp line.
        shards, work = [(0, shard) for shard in range(num_shards)], [[0] * num_cut for _ in range(num_shards)]
        owners: dict[int, tuple[int, int]] = {}
        for number in sorted(range(len(exchanges)), key=lambda number: -costs[number]):
            _, shard = heappop(shards)
            mine = work[shard]
            index = EVERY if exchanges[number][0].cut == "whole" else mine.index(min(mine))
            owners[number] = shard, index
            for rank in range(num_cut):
                mine[rank] += costs[number] * (index in (EVERY, rank))
            heappush(shards, (sum(mine), shard))
        matrices = tuple(PlacedMatrix(*exchanges[number], *owners[number]) for number in range(len(exchanges)))
        return cls(matrices, tuple(layout.shard_size for _, layout in units), num_shards, num_cut, itemsize)

    # Along the shards.

    def held(self, shard: int, placed: PlacedMatrix) -> list[Range]:
        """The ranges of a shard's elements that a matrix has there, counted from where the shard begins."""
        size = self.shard_sizes[placed.unit]
        start = shard * size - placed.offset
        return elements_within(placed.matrix, start, start + size)

    def num_held(self, shard: int, placed: PlacedMatrix) -> int:
        """Elements that a shard has of a matrix."""
        return sum(stop - start for start, stop in self.held(shard, placed))

    @cached_property
    def _by_owner(self) -> dict[int, list[PlacedMatrix]]:
        by_owner: dict[int, list[PlacedMatrix]] = {}
        for placed in self.matrices:
            by_owner.setdefault(placed.shard, []).append(placed)
        return by_owner

    def owned_parts(self, shard: int) -> list[PlacedMatrix]:
        """The matrices whose part is put together on a shard."""
        return self._by_owner.get(shard, [])

    # Along the tp line, of ranks at one place among the shards.

    def parts_of(self, shard: int, index: int) -> list[PlacedMatrix]:
        """The matrices of a shard that a rank of the tp line makes whole of its own and the others' parts."""
        return [placed for placed in self.owned_parts(shard) if placed.cut_index == index]

    def whole_ones(self, shard: int) -> list[PlacedMatrix]:
        """The matrices of a shard that every rank of the tp line has whole."""
        return [placed for placed in self.owned_parts(shard) if placed.cut_index == EVERY]

    @cached_property
    def crosses(self) -> bool:
        """True if anything travels along the tp line."""
        return any(placed.cut_index != EVERY for placed in self.matrices) and self.num_cut > 1

    # What it takes.

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """The bytes that a rank sends to others, by its places along "shards" or "tp"; there and back."""
        there = sum(self.num_held(shard, placed) for placed in self.matrices if placed.shard != shard)
        back = sum(p.matrix.num_elements - self.num_held(shard, p) for p in self.owned_parts(shard))
        mine = sum(placed.matrix.num_elements for placed in self.parts_of(shard, index))
        others = sum(p.matrix.num_elements for p in self.owned_parts(shard) if p.cut_index not in (EVERY, index))
        if self.num_shards > 1:
            yield "shards", self.itemsize * there
        if self.crosses:
            yield "tp", self.itemsize * others
            yield "tp", self.itemsize * mine * (self.num_cut - 1)
        if self.num_shards > 1:
            yield "shards", self.itemsize * back

    @cached_property
    def regions(self) -> tuple[int, int, int, int, int]:
        """Elements of memory on each rank, the most that any needs: rows that leave a shard, parts as they come to
        their owner among the shards, parts as they leave it along tp, whole matrices on their owners, and what
        Newton-Schulz computes with."""
        arrived = max(sum(placed.matrix.num_elements for placed in parts) for parts in self._by_owner.values())
        whole = max(
            self.num_cut * sum(placed.matrix.num_elements for placed in self.parts_of(shard, index))
            for shard in self._by_owner
            for index in range(self.num_cut)
        )
        sides = [sorted((placed.matrix.full_rows, placed.matrix.full_columns)) for placed in self.matrices]
        work = max(2 * short * long + 2 * short * short for short, long in sides)
        return (
            aligned_to(sum(self.shard_sizes)), aligned_to(arrived) * (self.num_shards > 1),
            aligned_to(arrived) * self.crosses, aligned_to(whole) * self.crosses, work,
        )  # fmt: skip

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all that memory."""
        return self.itemsize * sum(self.regions)


def exchanged_together(num_matrices: Sequence[int], num_owners: int) -> list[list[int]]:
    """Groups of units that are exchanged together, by the number of matrices of each unit: neighbours, about as many
    matrices as are enough, and about as many each time."""
    total = sum(num_matrices)
    times = max(1, round(total / (MATRICES_EACH * num_owners)))
    ends = accumulate(num_matrices)
    # By where the middle of a unit lies.
    parts = [(2 * end - own) * times // (2 * total) for own, end in zip(num_matrices, ends, strict=True)]
    return [list(numbers) for _, numbers in groupby(range(len(parts)), key=lambda unit: parts[unit])]
