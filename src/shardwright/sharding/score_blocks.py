"""Blocks of attention scores for queries that see only the keys of a window or of their chunk, or for scores that are
computed piece by piece: blocks of some queries with some keys, without the keys out of reach.

Each block has one range of positions of queries and one of keys, whatever ranges a rank holds (sequence.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.units import MIB
from shardwright.sharding.sequence import Ranges, ScoreBlock

LEAST_QUERIES = 128  # of a block of a window: shorter blocks cost more time than the scores that they leave out
SCORE_BYTES = 64 * MIB  # of float32 scores or biases of a block, of all heads and samples, if they are stored


@dataclass(frozen=True)
class KeyReach:
    """The keys that a query sees: the last `window` keys with its own, or, if it `is_chunked`, the keys of its chunk of
    `window` positions. A window of 0 is all keys before it."""

    window: int = 0
    is_chunked: bool = False

    def first_key(self, position: int) -> int:
        """The first position that a query sees."""
        if not self.window:
            return 0
        return position - position % self.window if self.is_chunked else max(0, position - self.window + 1)

    def limits(self, sequence: int) -> bool:
        """True if any query of a sequence sees fewer than all keys before it."""
        return 0 < self.window < sequence


ALL = KeyReach()


def most_queries(num_keys: int, rows: int) -> int:
    """Queries of a block with `num_keys` keys if its scores are stored; `rows` are the heads of all samples."""
    return max(8, SCORE_BYTES // (4 * rows * num_keys))


def blocks_in_reach(queries: Ranges, keys: Ranges, reach: KeyReach, most_queries: int = 0) -> list[ScoreBlock]:
    """The blocks of a rank's queries with a rank's keys, each of at most `most_queries` queries if that is not 0."""
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
    """The ranges, each with the place of its first position in the rank."""
    place = 0
    for positions in ranges:
        yield place, positions
        place += len(positions)


def _pieces(positions: range, reach: KeyReach, most_queries: int) -> Iterator[tuple[int, int]]:
    """The pieces (first, end) of a range of queries: chunks, or pieces so short that a window reaches little beyond the
    part that each query sees."""
    first = positions.start
    while first < positions.stop:
        end = positions.stop
        if reach.window and reach.is_chunked:
            end = min(end, reach.first_key(first) + reach.window)
        elif reach.window:
            end = min(end, first + max(LEAST_QUERIES, reach.window // 4))
        if most_queries:
            end = min(end, first + most_queries)
        yield first, end
        first = end
