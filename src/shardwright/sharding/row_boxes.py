"""The boxes of a tensor that cover a range of its rows.

ZeRO's shards end between rows (sharding/flat_buffer.py), so a rank holds a range of the rows of its part of a
parameter. In a matrix that range is a box; in the matrices of several experts it is up to three boxes: the end of one
matrix, whole matrices, and the beginning of another. Checkpoints are made of boxes, because any other plan can find its
own boxes in them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.parameter_shard import Box


@dataclass(frozen=True)
class RowBox:
    """Rows [first, end) of a part of a tensor, which are `box` in the whole tensor."""

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
    """The boxes, in order, that cover rows [first, end) of a part. Each is contiguous in the memory of the part."""
    if first >= end:
        return
    if len(part) < 2:  # a vector, or a scalar, which has no dim to be cut along
        yield RowBox(first, end, tuple((start + first, start + end) for start, _ in part))
        return
    yield from _boxes(part, part[:-1], first, end, 0)


def _boxes(part: Box, dims: Box, first: int, end: int, rows_before: int) -> Iterator[RowBox]:
    """The boxes of rows [first, end), counted within `dims`; `rows_before` rows of the part precede these dims."""
    (start, _), inner = dims[0], dims[1:]
    rows_of_index = num_elements_of(inner)
    dim = len(part) - 1 - len(dims)

    def within(low: int, high: int) -> RowBox:
        box = (*part[:dim], (start + low, start + high), *part[dim + 1 :])
        return RowBox(rows_before + low * rows_of_index, rows_before + high * rows_of_index, box)

    low, high = -(-first // rows_of_index), end // rows_of_index
    if low > high:  # the range begins and ends inside one index
        yield from _inside(part, dims, first, end, rows_before)
        return
    if first < low * rows_of_index:
        yield from _inside(part, dims, first, low * rows_of_index, rows_before)
    if low < high:
        yield within(low, high)
    if high * rows_of_index < end:
        yield from _inside(part, dims, high * rows_of_index, end, rows_before)


def _inside(part: Box, dims: Box, first: int, end: int, rows_before: int) -> Iterator[RowBox]:
    """The boxes of rows [first, end) that lie inside one index of the first of `dims`."""
    (start, _), inner = dims[0], dims[1:]
    rows_of_index = num_elements_of(inner)
    index = first // rows_of_index
    dim = len(part) - 1 - len(dims)
    narrowed = (*part[:dim], (start + index, start + index + 1), *part[dim + 1 :])
    skipped = index * rows_of_index
    yield from _boxes(narrowed, inner, first - skipped, end - skipped, rows_before + skipped)


def cut_rows(part: Box, first: int, end: int, most_elements: int) -> Iterator[RowBox]:
    """The boxes of `row_boxes`, none with more than `most_elements`, unless a single row has more."""
    _, row_size = rows_of(shape_of_box(part))
    step = max(1, most_elements // max(1, row_size))
    for start in range(first, end, step):
        yield from row_boxes(part, start, min(start + step, end))


def overlap(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of one tensor; None if there is none."""
    shared = list[tuple[int, int]]()
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        low, high = max(start, other_start), min(stop, other_stop)
        if low >= high:  # most pairs of a large job are apart in their first dim
            return None
        shared.append((low, high))
    return tuple(shared)
