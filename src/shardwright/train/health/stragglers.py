"""Ranks that compute more slowly than they should: a device that is throttled, a disturbed host.

What a rank computes is a step without the time in which it is blocked by others, so one slow rank does not make all
look slow. Of the steps between two progress lines a rank gives the median, which a hiccup does not move. It is held
against the median of the others that do the same work, the ranks at its place in the pipeline; and against its own
past: it takes longer, and a larger share of the median of all. The second finds a rank that has become slow where no
other does the same work. A rank is told when it was slow twice in a row.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_PAST = 20  # looks that are remembered
_LEAST_PAST = 3  # of them before a rank is held against its own past
_IN_A_ROW = 2


@dataclass(frozen=True)
class Straggler:
    """A slow rank: its compute time of a step, by how much that is longer than others' or its own past, as a share of
    theirs, and the first step, counted from 1, of the time in which it was slow."""

    rank: int
    compute_s: float
    longer_than_others: float
    longer_than_before: float
    since_step: int

    def sentence(self, who: str) -> str:
        """The sentence about a straggler. `who` describes the rank."""
        found = []
        if self.longer_than_others > 0:
            found.append(f"{self.longer_than_others:.0%} longer than others that do the same")
        if self.longer_than_before > 0:
            found.append(f"{self.longer_than_before:.0%} longer than before, beside all others")
        return (
            f"slow: {who} computes {self.compute_s:.3f} s a step, {' and '.join(found)}, since step {self.since_step}"
        )


class Stragglers:
    """Finds slow ranks from the compute times of all, look after look."""

    def __init__(self, slow_share: float, peers: Sequence[Sequence[int]]) -> None:
        """`peers` are the ranks that do the same work; every rank is in one of them."""
        self._slow_share = slow_share
        self._others = {rank: [other for other in held if other != rank] for held in peers for rank in held}
        self._past: dict[int, deque[tuple[float, float]]] = {rank: deque(maxlen=_PAST) for rank in self._others}
        self._slow_since: dict[int, list[int]] = {}  # first step, and looks in a row
        self.told: set[int] = set()

    def look(self, first_step: int, compute_s: Sequence[float]) -> list[Straggler]:
        """The slow ranks. `compute_s` are seconds of a step by rank, in the steps from `first_step`, counted from 1, on
        that no look has seen yet."""
        if len(compute_s) < 2 or self._slow_share <= 0:
            return []
        of_all = median(compute_s)
        found = []
        for rank, mine_s in enumerate(compute_s):
            others, past = [compute_s[other] for other in self._others[rank]], self._past[rank]
            by_others = self._over(mine_s, median(others)) if others else 0.0
            share, by_past = mine_s / of_all if of_all > 0 else 1.0, 0.0
            if len(past) >= _LEAST_PAST:
                shares, times_s = zip(*past, strict=True)
                # Else another rank that has become fast again would make this one look slow.
                by_past = min(self._over(share, median(shares)), self._over(mine_s, median(times_s)))
            is_slow = by_others > 0 or by_past > 0
            if not is_slow:
                self._slow_since.pop(rank, None)
                past.append((share, mine_s))
                continue
            since = self._slow_since.setdefault(rank, [first_step, 0])
            since[1] += 1
            if since[1] >= _IN_A_ROW:
                self.told.add(rank)
                found.append(Straggler(rank, mine_s, by_others, by_past, since[0]))
        return found

    def _over(self, mine: float, theirs: float) -> float:
        """Share by which `mine` is more, if it is slow, else 0."""
        return mine / theirs - 1.0 if theirs > 0 and mine > (1.0 + self._slow_share) * theirs else 0.0
