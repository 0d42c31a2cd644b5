"""The places of tensors in a flat buffer that is cut into equal shards, so that no shard ends inside a row.

ZeRO shards a buffer of many tensors, not each tensor: one collective moves the buffer without a copy, because the
tensors are views of it. Rows stay whole (a row is the last dim of a tensor; a vector has rows of one element), so that
an operation on a whole row, such as a norm or a scale by row, never needs another rank. The price is padding if a cut
would fall inside a row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Rows = tuple[int, int]  # number of rows of a tensor, elements of each


@dataclass(frozen=True)
class FlatLayout:
    """Offset of each tensor, in elements, and the size of one shard."""

    offsets: tuple[int, ...]
    shard_size: int
    num_shards: int

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_size * self.num_shards


def rows_of(shape: Sequence[int]) -> Rows:
    """Rows of a tensor: its last dim is a row; a vector has rows of a single element."""
    row_size = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // row_size, row_size


def flat_layout(tensors: Sequence[Rows], num_shards: int) -> FlatLayout:
    """The tensors one after the other, in the smallest buffer found that `num_shards` cuts between rows.

    Any large enough shard size that is a multiple of all row sizes will do, if the first row after each cut is moved to
    it. Often a smaller size does too, and the smallest of some candidates is taken.
    """
    return _layout(tuple(tensors), num_shards)


@lru_cache(maxsize=1024)  # layers are alike, and each rank's account asks for all of them
def _layout(tensors: tuple[Rows, ...], num_shards: int) -> FlatLayout:
    if num_shards == 1:
        size = sum(num_rows * row_size for num_rows, row_size in tensors)
        return FlatLayout(_place(tensors, size) or (), size, 1)
    for shard_size in _candidates(tensors, num_shards):
        offsets = _place(tensors, shard_size)
        if offsets is not None and _end(tensors, offsets) <= shard_size * num_shards:
            return FlatLayout(offsets, shard_size, num_shards)
    raise AssertionError("a multiple of all row sizes always fits")


def _candidates(tensors: Sequence[Rows], num_shards: int) -> Iterator[int]:
    """Shard sizes worth trying, ascending; the last one always fits."""
    total = sum(num_rows * row_size for num_rows, row_size in tensors)
    smallest = -(-total // num_shards)
    row_sizes = {row_size for _, row_size in tensors}
    common = math.lcm(*row_sizes)
    # Each cut costs less than one row of padding.
    largest = -(-(total + num_shards * max(row_sizes)) // num_shards // common) * common + common
    tried = {smallest, largest}
    for unit in row_sizes | {common}:
        first_multiple = -(-smallest // unit)
        tried |= {(first_multiple + i) * unit for i in range(2 * num_shards)}
    return iter(sorted(size for size in tried if smallest <= size <= largest))


def _place(tensors: Sequence[Rows], shard_size: int) -> tuple[int, ...] | None:
    """Offsets with the least padding for shards of this size; None if a cut would fall inside a row."""
    offsets, offset = [], 0
    for num_rows, row_size in tensors:
        size = num_rows * row_size
        next_shard = -(-offset // shard_size) * shard_size  # the first one at or after the tensor's first element
        if next_shard < offset + size:
            offset += (next_shard - offset) % row_size
            if next_shard + shard_size < offset + size and shard_size % row_size:
                return None
        offsets.append(offset)
        offset += size
    return tuple(offsets)


def _end(tensors: Sequence[Rows], offsets: tuple[int, ...]) -> int:
    num_rows, row_size = tensors[-1]
    return offsets[-1] + num_rows * row_size
