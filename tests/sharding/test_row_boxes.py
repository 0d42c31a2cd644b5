"""Rows of a part of a tensor are boxes of it: together the same elements, in the same order."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.row_boxes import cut_rows, overlap, row_boxes, shape_of_box

BOXES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4).map(
    lambda dims: tuple((start, start + size) for start, size in dims)
)


@given(BOXES, st.data())
def test_the_boxes_of_some_rows_are_those_rows(part, data) -> None:
    full = np.arange(math.prod(stop + 1 for _, stop in part)).reshape([stop + 1 for _, stop in part])
    held = full[tuple(slice(*ends) for ends in part)]
    num_rows, row_size = rows_of(held.shape)
    first = data.draw(st.integers(0, num_rows))
    end = data.draw(st.integers(first, num_rows))
    most = data.draw(st.integers(1, 40))
    rows = held.reshape(num_rows, row_size)
    for results in (list(row_boxes(part, first, end)), list(cut_rows(part, first, end, most))):
        assert [box.first for box in results] == sorted(box.first for box in results)
        for box in results:
            inside = full[tuple(slice(*ends) for ends in box.box)]
            assert inside.shape == box.shape
            assert np.array_equal(inside.reshape(-1), rows[box.first : box.end].reshape(-1))
        joined = [row for box in results for row in range(box.first, box.end)]
        assert joined == list(range(first, end))
    assert len(list(row_boxes(part, first, end))) <= max(1, 2 * len(part) - 3)
    assert all(math.prod(box.shape) <= max(most, row_size) for box in cut_rows(part, first, end, most))


@given(BOXES, st.data())
def test_what_two_boxes_share(one, data) -> None:
    other = tuple(
        (start, start + size)
        for start, size in (data.draw(st.tuples(st.integers(0, 5), st.integers(1, 4))) for _ in one)
    )
    shared = overlap(one, other)
    inside = [set(np.ndindex(*shape_of_box(box))) for box in (one, other)]
    both = {tuple(i + b[0] for i, b in zip(place, one, strict=True)) for place in inside[0]} & {
        tuple(i + b[0] for i, b in zip(place, other, strict=True)) for place in inside[1]
    }
    assert (0 if shared is None else math.prod(shape_of_box(shared))) == len(both)
