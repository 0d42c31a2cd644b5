"""Detection of slow ranks, as from a throttled device or a disturbed host.

The compute time of a rank is its step time without the time in which other ranks block it, so that one slow rank does
not make all look slow. A rank reports the median of the steps between two progress lines, which a single slow step does
not change. Two comparisons follow. The first is with the median of the ranks that do the same work, at the same place
in the pipeline. The second is with the rank's own past: it takes longer, and a larger share of the median of all ranks.
The second detects a rank that becomes slow if no other rank does the same work. A rank is reported when it was slow
twice in a row.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwright.config.phrase import both, say

_MOST_PAST = 20  # checks of a rank that are remembered
_LEAST_PAST = 3  # remembered checks that a comparison with a rank's own past needs
_IN_A_ROW = 2  # slow checks in a row before a rank is reported


@dataclass(frozen=True)
class Straggler:
    """A slow rank: its compute time per step, the excess over other ranks and over its own past (as shares of their
    times, 0 if it is not slower), and the first step, counted from 1, since which it is slow."""

    rank: int
    compute_s: float
    longer_than_others: float
    longer_than_before: float
    since_step: int

    def sentence(self, rank_name: str) -> str:
        """The sentence about a straggler. `rank_name` describes the rank."""
        reasons: list[str] = []
        if self.longer_than_others > 0:
            reasons.append(
                say(
                    "{longer_than_others:.0%} longer than others that do the same",
                    longer_than_others=self.longer_than_others,
                )
            )
        if self.longer_than_before > 0:
            reasons.append(
                say(
                    "{longer_than_before:.0%} longer than before, beside all others",
                    longer_than_before=self.longer_than_before,
                )
            )
        return say(
            "slow: {rank_name} computes {compute_s:.3f} s a step, {reasons}, since step {since_step}",
            rank_name=rank_name,
            compute_s=self.compute_s,
            reasons=both(reasons),
            since_step=self.since_step,
        )


class Stragglers:
    """Detects slow ranks from the compute times of all ranks, check by check."""

    def __init__(self, slow_share: float, peers: Sequence[Sequence[int]]) -> None:
        """`peers` are groups of ranks that do the same work; every rank is in one of them."""
        self._slow_share = slow_share
        self._others = {rank: [other for other in group if other != rank] for group in peers for rank in group}
        # For each rank, its checks that were not slow: its share of the median of all ranks, and its time.
        self._past: dict[int, deque[tuple[float, float]]] = {rank: deque(maxlen=_MOST_PAST) for rank in self._others}
        self._slow_since: dict[int, list[int]] = {}  # first step, and number of slow checks in a row
        self.reported: set[int] = set()  # ranks

    def look(self, first_step: int, compute_s: Sequence[float]) -> list[Straggler]:
        """Check all ranks, and return those that are slow. `compute_s` are the seconds per step by rank, in the steps
        since the last check, from `first_step` on, counted from 1."""
        if len(compute_s) < 2 or self._slow_share <= 0:
            return []
        median_s = median(compute_s)
        stragglers = []
        for rank, rank_s in enumerate(compute_s):
            others_s, past = [compute_s[other] for other in self._others[rank]], self._past[rank]
            over_others = self._excess(rank_s, median(others_s)) if others_s else 0.0
            share, over_past = rank_s / median_s if median_s > 0 else 1.0, 0.0
            if len(past) >= _LEAST_PAST:
                shares, times_s = zip(*past, strict=True)
                # By the share alone, a rank would look slow when another rank becomes fast again.
                over_past = min(self._excess(share, median(shares)), self._excess(rank_s, median(times_s)))
            is_slow = over_others > 0 or over_past > 0
            if not is_slow:
                self._slow_since.pop(rank, None)
                past.append((share, rank_s))
                continue
            since = self._slow_since.setdefault(rank, [first_step, 0])
            since[1] += 1
            if since[1] >= _IN_A_ROW:
                self.reported.add(rank)
                stragglers.append(Straggler(rank, rank_s, over_others, over_past, since[0]))
        return stragglers

    def _excess(self, value: float, reference: float) -> float:
        """The share by which a value exceeds its reference, 0 if it is no more than `slow_share`."""
        is_slow = reference > 0 and value > (1.0 + self._slow_share) * reference
        return value / reference - 1.0 if is_slow else 0.0
