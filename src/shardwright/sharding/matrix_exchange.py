"""The owner of each whole matrix that is made orthogonal, and the traffic to it and back: Muon under ZeRO and tensor
parallel.

Newton-Schulz needs a whole matrix, and takes about 30 h FLOPs per element of an h x h matrix: for h = 4,096 as many as
training on 20,000 tokens. So each matrix has one owner, the rank with the least work so far. The other ranks send it
their rows, and it sends back the rows of the orthogonal matrix. Each element goes to the owner and back once along the
line of ZeRO's shards, and once more along the line of tensor parallel if that cuts the matrix. To gather all matrices
on all ranks would move as many bytes, and every rank would do the work of all.

A unit may have fewer matrices than there are ranks. So neighbouring units are exchanged together, as many as have about
three matrices for each rank that may own one (`exchanged_together`): enough to spread the work evenly, with the memory
of only a few matrices on each rank.

    shards    rows of a rank's shard         ->  the part of each matrix that the owner's place on the tp line has
    tp        parts of whole matrices        ->  whole matrices, on their owners
    back      the same ways, in reverse order

Without ZeRO a replica holds the whole state and does all of the work itself, as it does any other update.
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

MATRICES_EACH = 3  # matrices exchanged together, about, per rank that may own one
_ALIGNED = 64  # elements: pieces of memory begin at multiples of it

PlacedUnit = tuple[Sequence[ParameterShard], FlatLayout]

ALL_TP_RANKS = -1  # an owner's index on the tp line if every rank of the line has the whole matrix


def orthogonal_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of Newton-Schulz with `steps` steps: each has two matrix products of short x short x long elements, and one
    of short x short x short."""
    shorter, longer = min(rows, columns), max(rows, columns)
    return steps * (4 * shorter * shorter * longer + 2 * shorter**3)


def aligned_to(num_elements: int) -> int:
    """`num_elements` rounded up, so that the next piece of memory begins aligned."""
    return -(-num_elements // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix of unit number `unit`: the offset of its parameter in the unit's buffer, in elements, and its owner's
    place among the shards and index on the tp line."""

    matrix: UpdateMatrix
    unit: int
    offset: int
    shard: int
    tp_owner: int


@dataclass(frozen=True)
class MatrixExchange:
    """The matrices of units, with the sizes of the units' shards in elements, and the number of ranks that share them:
    `num_shards` of ZeRO, `tp_size` of tensor parallel. `itemsize` is the bytes of an element that travels and is
    computed with."""

    matrices: tuple[PlacedMatrix, ...]
    shard_sizes: tuple[int, ...]
    num_shards: int
    tp_size: int
    itemsize: int

    @classmethod
    def of(cls, shape: ModelShape, units: Sequence[PlacedUnit], tp_size: int, itemsize: int) -> "MatrixExchange":
        """The exchange of the matrices of these units, each of its parameters and their layout in its buffer."""
        num_shards = units[0][1].num_shards
        exchanges = [
            (matrix, unit, offset)
            for unit, (places, layout) in enumerate(units)
            for place, offset in zip(places, layout.offsets, strict=True)
            for matrix in update_matrices(shape, place)
        ]
        costs = [orthogonal_flops(matrix.full_rows, matrix.full_columns, 1) for matrix, _, _ in exchanges]
        # The owner is on the shard with the least work, and there the rank of the tp line with the least work.
        shards, work = [(0, shard) for shard in range(num_shards)], [[0] * tp_size for _ in range(num_shards)]
        owners: dict[int, tuple[int, int]] = {}
        for number in sorted(range(len(exchanges)), key=lambda number: -costs[number]):
            _, shard = heappop(shards)
            shard_work = work[shard]
            index = ALL_TP_RANKS if exchanges[number][0].split == "whole" else shard_work.index(min(shard_work))
            owners[number] = shard, index
            for rank in range(tp_size):
                shard_work[rank] += costs[number] * (index in (ALL_TP_RANKS, rank))
            heappush(shards, (sum(shard_work), shard))
        matrices = tuple(PlacedMatrix(*exchanges[number], *owners[number]) for number in range(len(exchanges)))
        return cls(matrices, tuple(layout.shard_size for _, layout in units), num_shards, tp_size, itemsize)

    # Along the shards.

    def held(self, shard: int, placed: PlacedMatrix) -> list[Range]:
        """The ranges of a matrix's elements in a shard, counted from the beginning of the shard."""
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
        """The matrices whose part is assembled on a shard."""
        return self._by_owner.get(shard, [])

    # Along the tp line, of ranks at one place among the shards.

    def parts_of(self, shard: int, index: int) -> list[PlacedMatrix]:
        """The matrices of a shard that a rank of the tp line assembles from its own part and the others'."""
        return [placed for placed in self.owned_parts(shard) if placed.tp_owner == index]

    @cached_property
    def uses_tp_exchange(self) -> bool:
        """True if anything travels along the tp line."""
        return any(placed.tp_owner != ALL_TP_RANKS for placed in self.matrices) and self.tp_size > 1

    # Traffic and memory.

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """The bytes that a rank sends along "shards" or "tp", to the owners and then back, by the rank's shard and its
        index on the tp line."""
        to_owners = sum(self.num_held(shard, placed) for placed in self.matrices if placed.shard != shard)
        to_shards = sum(p.matrix.num_elements - self.num_held(shard, p) for p in self.owned_parts(shard))
        own_elements = sum(placed.matrix.num_elements for placed in self.parts_of(shard, index))
        other_elements = sum(
            p.matrix.num_elements for p in self.owned_parts(shard) if p.tp_owner not in (ALL_TP_RANKS, index)
        )
        if self.num_shards > 1:
            yield "shards", self.itemsize * to_owners
        if self.uses_tp_exchange:
            yield "tp", self.itemsize * other_elements
            yield "tp", self.itemsize * own_elements * (self.tp_size - 1)
        if self.num_shards > 1:
            yield "shards", self.itemsize * to_shards

    @cached_property
    def regions(self) -> tuple[int, int, int, int, int]:
        """Elements of memory on each rank, the most that any rank needs: rows that leave a shard, parts as they arrive
        at their owner among the shards, parts as they leave it along tp, whole matrices on their owners, and the
        workspace of Newton-Schulz."""
        arrived = max(sum(placed.matrix.num_elements for placed in parts) for parts in self._by_owner.values())
        whole_matrices = max(
            self.tp_size * sum(placed.matrix.num_elements for placed in self.parts_of(shard, index))
            for shard in self._by_owner
            for index in range(self.tp_size)
        )
        sides = [sorted((placed.matrix.full_rows, placed.matrix.full_columns)) for placed in self.matrices]
        work = max(2 * short * long + 2 * short * short for short, long in sides)
        return (
            aligned_to(sum(self.shard_sizes)),
            aligned_to(arrived) * (self.num_shards > 1),
            aligned_to(arrived) * self.uses_tp_exchange,
            aligned_to(whole_matrices) * self.uses_tp_exchange,
            work,
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all that memory."""
        return self.itemsize * sum(self.regions)


def exchanged_together(num_matrices: Sequence[int], num_owners: int) -> list[list[int]]:
    """Groups of neighbouring units that are exchanged together, from the number of matrices of each unit: each group
    has about the same number of matrices, just enough for all owners."""
    total = sum(num_matrices)
    times = max(1, round(total / (MATRICES_EACH * num_owners)))
    ends = accumulate(num_matrices)
    # The middle of a unit decides its group.
    parts = [(2 * end - count) * times // (2 * total) for count, end in zip(num_matrices, ends, strict=True)]
    return [list(numbers) for _, numbers in groupby(range(len(parts)), key=lambda unit: parts[unit])]
