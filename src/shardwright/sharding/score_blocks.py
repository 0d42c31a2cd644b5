"""Blocks of scores for attention if a query sees the keys of a window or of its chunk alone, or if scores are computed
piece by piece: blocks of some queries with some keys, of which those out of reach are left out.

Each block has one range of positions of queries and one of keys, whatever ranges a rank holds (sequence.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.units import MIB
from shardwright.sharding.sequence import Ranges, ScoreBlock

LEAST_QUERIES = 128  # of a block of a window: shorter ones are slower than what they leave out
SCORE_BYTES = 64 * MIB  # of all heads and samples at once, in float32, where a block's scores or their biases are made


@dataclass(frozen=True)
class KeyReach:
    """How far back a query sees: the last `window` keys, its own among them, or where it `is_chunked` those of its
    chunk of so many positions. 0 is all keys before it."""

    window: int = 0
    is_chunked: bool = False

    def first_key(self, position: int) -> int:
        """The first position that a query sees."""
        if not self.window:
            return 0
        return position - position % self.window if self.is_chunked else max(0, position - self.window + 1)

    def limits(self, sequence: int) -> bool:
        """True if any query of a sequence sees less than all keys before it."""
        return 0 < self.window < sequence


ALL = KeyReach()


def most_queries(num_keys: int, rows: int) -> int:
    """Queries of a block with so many keys whose scores are made, where `rows` are the heads of all samples."""
    return max(8, SCORE_BYTES // (4 * rows * num_keys))


def blocks_in_reach(queries: Ranges, keys: Ranges, reach: KeyReach, most_queries: int = 0) -> list[ScoreBlock]:
    """The blocks of what is held by a rank of queries and one of keys, of at most so many queries if that is not 0."""
    return [
        ScoreBlock(
            queries=slice(q_place + first - q.start, q_place + end - q.start),
            keys=slice(k_place + low - k.start, k_place + high - k.start),
            is_causal=(first, end) == (low, high) and reach.first_key(end - 1) <= low,
            has_edge=reach.first_key(end - 1) > low or high > first + 1,
            first_query=first,
            first_key=low,
        )
        for q_place, q in _with_places(queries)
        for first, end in _pieces(q, reach, most_queries)
        for k_place, k in _with_places(keys)
        if (low := max(k.start, reach.first_key(first))) < (high := min(k.stop, end))
    ]


def _with_places(ranges: Ranges) -> Iterator[tuple[int, range]]:
    """Ranges with the place of their first position in the rank."""
    place = 0
    for positions in ranges:
        yield place, positions
        place += len(positions)


def _pieces(positions: range, reach: KeyReach, most: int) -> Iterator[tuple[int, int]]:
    """A range of queries as pieces (first, end): a chunk's, or such that a window reaches little beyond what each sees
    of itself."""
    first = positions.start
    while first < positions.stop:
        end = positions.stop
        if reach.window and reach.is_chunked:
            end = min(end, reach.first_key(first) + reach.window)
        elif reach.window:
            end = min(end, first + max(LEAST_QUERIES, reach.window // 4))
        if most:
            end = min(end, first + most)
        yield first, end
        first = end
