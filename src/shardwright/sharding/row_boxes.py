"""The boxes of a tensor that some of its rows make up.

ZeRO's shards end between rows (sharding/flat_buffer.py), so what a rank holds of a parameter is a range of the rows of
its part. Of a matrix that is a box; of the matrices of several experts it is up to three: the end of one, whole ones,
and the beginning of another. Boxes are what a checkpoint is made of, for any other plan can find its own in them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.parameter_shard import Box


@dataclass(frozen=True)
class RowBox:
    """Rows [first, end) of a part of a tensor, which are this box of the whole tensor."""

    first: int
    end: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return shape_of_box(self.box)


def shape_of_box(box: Box) -> tuple[int, ...]:
    """Sizes of a box, dim by dim."""
    return tuple(stop - start for start, stop in box)


def num_elements_of(box: Box) -> int:
    """Elements of a box."""
    return math.prod(shape_of_box(box))


def row_boxes(part: Box, first: int, end: int) -> Iterator[RowBox]:
    """The boxes, in order, that rows [first, end) of a part are. Each is contiguous in the memory of the part."""
    if first >= end:
        return
    if len(part) < 2:  # of a vector, and a number alone, which has no dim to be cut along
        yield RowBox(first, end, tuple((start + first, start + end) for start, _ in part))
        return
    yield from _boxes(part, part[:-1], first, end, 0)


def _boxes(part: Box, dims: Box, first: int, end: int, before: int) -> Iterator[RowBox]:
    """Rows [first, end) of those that `dims` count, of which `before` rows of the part come before the first."""
    (start, _), inner = dims[0], dims[1:]
    rows_of_one = num_elements_of(inner)
    done = len(part) - 1 - len(dims)

    def within(low: int, high: int) -> RowBox:
        box = (*part[:done], (start + low, start + high), *part[done + 1 :])
        return RowBox(before + low * rows_of_one, before + high * rows_of_one, box)

    low, high = -(-first // rows_of_one), end // rows_of_one
    if low > high:  # begins and ends inside one
        yield from _inside(part, dims, first, end, before)
        return
    if first < low * rows_of_one:
        yield from _inside(part, dims, first, low * rows_of_one, before)
    if low < high:
        yield within(low, high)
    if high * rows_of_one < end:
        yield from _inside(part, dims, high * rows_of_one, end, before)


def _inside(part: Box, dims: Box, first: int, end: int, before: int) -> Iterator[RowBox]:
    """Rows [first, end) that lie inside one index of the first of `dims`."""
    (start, _), inner = dims[0], dims[1:]
    rows_of_one = num_elements_of(inner)
    index = first // rows_of_one
    done = len(part) - 1 - len(dims)
    narrowed = (*part[:done], (start + index, start + index + 1), *part[done + 1 :])
    skipped = index * rows_of_one
    yield from _boxes(narrowed, inner, first - skipped, end - skipped, before + skipped)


def cut_rows(part: Box, first: int, end: int, most_elements: int) -> Iterator[RowBox]:
    """`row_boxes`, none with more than `most_elements`, unless a row alone has more."""
    _, row_size = rows_of(shape_of_box(part))
    step = max(1, most_elements // max(1, row_size))
    for start in range(first, end, step):
        yield from row_boxes(part, start, min(start + step, end))


def overlap(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of one tensor; None if there is none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None
