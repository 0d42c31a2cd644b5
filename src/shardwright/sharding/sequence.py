"""How context parallel cuts a sequence: which positions a rank holds, and which scores of attention it computes.

Under a causal mask a late token attends to more than an early one. Ring and all-gather attention leave queries where
they are, so contiguous parts would leave the last rank with the most work. There the sequence is cut into 2 x cp
chunks, and rank r holds chunks r and 2 cp - 1 - r: one early and one late, "zig-zag". Then each rank computes as many
scores as every other. Ulysses trades tokens for heads before it attends, and each rank sees the whole sequence of its
heads; there a rank holds one contiguous part, whose parts in the order of the ranks are the sequence.
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
    """Part `index` of `parts` equal ones of the positions in `ranges`, as they follow each other."""
    each, rest = divmod(sum(map(len, ranges)), parts)
    assert rest == 0, f"{sum(map(len, ranges))} positions do not split into {parts} parts"
    first, end = each * index, each * (index + 1)
    starts = list(accumulate(map(len, ranges[:-1]), initial=0))
    pieces = (r[max(first - start, 0) : max(end - start, 0)] for r, start in zip(ranges, starts, strict=True))
    return tuple(r for r in pieces if r)


def positions_of(ranges: Sequence[range]) -> list[int]:
    """The positions themselves."""
    return [position for r in ranges for position in r]


@dataclass(frozen=True)
class ScoreBlock:
    """A rectangle of scores: some of a rank's queries with some of a rank's keys, both by their place in the rank.

    `is_causal` is for queries and keys of the same tokens: a query sees the keys that are not after it. Where it
    `has_edge` positions say which keys a query sees, from `first_query` and `first_key` on; else it sees all.
    """

    queries: slice
    keys: slice
    is_causal: bool
    has_edge: bool = False
    first_query: int = 0
    first_key: int = 0


def block_of(index: int, source: int, num_held: int, is_causal: bool) -> ScoreBlock:
    """The block of scores of the queries of rank `index` with the keys of rank `source`, if each holds `num_held` in
    zig-zag.

    Under a causal mask, of an earlier rank's keys all queries see the first half and none the second; of a later
    rank's, the second half of the queries sees all and the first none.
    """
    half, everything = num_held // 2, slice(0, num_held)
    if not is_causal or source == index:
        return ScoreBlock(everything, everything, is_causal)
    if source < index:
        return ScoreBlock(everything, slice(0, half), False)
    return ScoreBlock(slice(half, num_held), everything, False)
