"""Laps of a list, such as the steady phase of a pipeline: items that come again and again in the same order."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # numpy is loaded only where there is a list to cut, for the estimate of a small job needs none
    from shardwright.layers.arrays import Array

_LONGEST_LAP = 64  # items
_FEWEST_LAPS = 4
_LEAST_SAVED = 16  # laps save at least this part of the list, so that few cuts are looked for


class Laps(NamedTuple):
    """`length` items of a list from `start` on, which come `times` times, one lap after the other."""

    start: int
    length: int
    times: int


def laps_of(items: Sequence[Hashable]) -> list[Laps]:
    """A list cut into laps, which follow each other and cover it. Items that do not come again are a single lap."""
    import numpy as np

    numbers: dict[Hashable, int] = {}
    return _cut(np.array([numbers.setdefault(item, len(numbers)) for item in items]), 0, len(items))


def _cut(numbers: "Array", start: int, end: int) -> list[Laps]:
    """The laps of items `start` to `end`: those that save most, and those of the items before and after them."""
    import numpy as np

    if start == end:
        return []
    most_saved, best = len(numbers) // _LEAST_SAVED, None
    for length in range(1, min(_LONGEST_LAP, (end - start) // _FEWEST_LAPS) + 1):
        changes = np.flatnonzero(numbers[start : end - length] != numbers[start + length : end])
        edges = np.concatenate(([-1], changes, [end - start - length]))
        longest = int(np.diff(edges).argmax())
        count = int(edges[longest + 1] - edges[longest] - 1) // length + 1
        if count >= _FEWEST_LAPS and (count - 1) * length > most_saved:
            most_saved, best = (count - 1) * length, Laps(start + int(edges[longest]) + 1, length, count)
    if best is None:
        return [Laps(start, end - start, 1)]
    return [*_cut(numbers, start, best.start), best, *_cut(numbers, best.start + best.length * best.times, end)]
