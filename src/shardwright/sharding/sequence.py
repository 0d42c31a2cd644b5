"""The cut of a sequence by context parallel: the positions that a rank holds, and the attention scores it computes.

Under a causal mask a late token attends to more keys than an early one. Ring and all-gather attention do not move
queries, so contiguous parts would leave the last rank with the most work. Therefore the sequence is cut into 2 x cp
chunks, and rank r holds chunks r and 2 cp - 1 - r: one early and one late, "zig-zag". Then every rank computes the same
number of scores. Ulysses trades tokens for heads before attention, and each rank sees the whole sequence of its heads;
there a rank holds one contiguous part, and the parts in the order of the ranks are the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.config.plan import chunks_per_rank

Ranges = tuple[range, ...]  # positions, in the order in which a rank holds them


def held_ranges(sequence: int, size: int, index: int, method: str) -> Ranges:
    """The positions of rank `index` of `size`, ascending. The sequence must divide (config/checks/check.py)."""
    if size == 1:
        return (range(sequence),)
    chunks = chunks_per_rank(method) * size
    assert sequence % chunks == 0, f"{sequence} tokens do not split into {chunks} chunks"
    length = sequence // chunks
    numbers = (index,) if chunks == size else (index, chunks - 1 - index)
    return tuple(range(number * length, (number + 1) * length) for number in numbers)


def share_of(ranges: Ranges, parts: int, index: int) -> Ranges:
    """Part `index` of `parts` equal parts of the positions in `ranges`, in their order."""
    part_size, remainder = divmod(sum(map(len, ranges)), parts)
    assert remainder == 0, f"{sum(map(len, ranges))} positions do not split into {parts} parts"
    first, end = part_size * index, part_size * (index + 1)
    starts = list(accumulate(map(len, ranges[:-1]), initial=0))
    pieces = (r[max(first - start, 0) : max(end - start, 0)] for r, start in zip(ranges, starts, strict=True))
    return tuple(r for r in pieces if r)


def positions_of(ranges: Sequence[range]) -> list[int]:
    """All positions of the ranges, in order."""
    return [position for r in ranges for position in r]


def ring_source(index: int, step: int, size: int) -> int:
    """The rank whose keys and values are with rank `index` of `size` at a step: its own first, then those of the ranks
    before it, one by one."""
    return (index - step) % size


@dataclass(frozen=True)
class ScoreBlock:
    """A rectangle of scores: some of a rank's queries with some of a rank's keys, both by their place in the rank.

    `is_causal` is for queries and keys of the same tokens: a query sees the keys that are not after it. If the block
    `has_edge`, positions counted from `first_query` and `first_key` say which keys a query sees; else it sees all.
    """

    queries: slice
    keys: slice
    is_causal: bool
    has_edge: bool = False
    first_query: int = 0
    first_key: int = 0


def block_of(index: int, source: int, num_held: int, is_causal: bool) -> ScoreBlock:
    """The block of scores of the queries of rank `index` with the keys of rank `source`, if each holds `num_held`
    positions in zig-zag.

    Under a causal mask all queries see the first half of an earlier rank's keys, and none see the second half. Of a
    later rank's keys, the second half of the queries sees all, and the first half none.
    """
    half, everything = num_held // 2, slice(0, num_held)
    if not is_causal or source == index:
        return ScoreBlock(everything, everything, is_causal)
    if source < index:
        return ScoreBlock(everything, slice(0, half), False)
    return ScoreBlock(slice(half, num_held), everything, False)
