"""Flat layouts: every tensor once, no overlap, no cut inside a row, little padding."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.sharding.flat_buffer import Rows, flat_layout, rows_of

tensors = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(tensors, st.integers(1, 9))
def test_no_row_is_cut_and_nothing_overlaps(held: list[Rows], num_shards: int) -> None:
    layout = flat_layout(held, num_shards)
    assert layout.size == layout.shard_size * num_shards
    end = 0
    for (num_rows, row_size), offset in zip(held, layout.offsets, strict=True):
        assert offset >= end
        end = offset + num_rows * row_size
        for row in range(num_rows):
            first = offset + row * row_size
            assert first // layout.shard_size == (first + row_size - 1) // layout.shard_size
    assert end <= layout.size


@given(tensors)
def test_one_shard_has_no_padding(held: list[Rows]) -> None:
    layout = flat_layout(held, 1)
    assert layout.size == sum(rows * size for rows, size in held)


def test_layers_of_real_models_pad_little() -> None:
    for hidden, ffn, kv in ((512, 1536, 512), (4096, 14336, 1024), (5120, 13824, 5120), (8192, 28672, 1024)):
        matrices = [(hidden, ffn), (2 * ffn, hidden), (hidden + 2 * kv, hidden), (hidden, hidden)]
        for num_shards in (2, 3, 4, 8, 16, 64):
            held = [*matrices, (2 * hidden, 1)]
            total = sum(rows * size for rows, size in held)
            assert flat_layout(held, num_shards).size < 1.02 * total + num_shards * ffn


def test_rows_are_along_the_last_dim() -> None:
    assert rows_of((3, 4, 5)) == (12, 5)
    assert rows_of((7,)) == (7, 1)
    assert math.prod(rows_of((2, 6))) == 12
