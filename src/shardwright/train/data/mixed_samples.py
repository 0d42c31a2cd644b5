"""Several sources as one sequence of samples: from which source each is, exactly by weight, at any place at once.

After n samples a source of weight w (of all weights 1) has had less than one sample more or fewer than w n: with two
sources the nearest whole number to it. That is Tijdeman's rule ("The chairman assignment problem", 1980): of k sources,
among those that are behind by 1 / (2k - 2) or more, the one is next that would soonest be too far behind.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from shardwright.train.data.samples import SampleReader, refuse_negative

# The order repeats after the sum of the weights as whole numbers, in their lowest terms; of weights that are no such
# small numbers these are the nearest.
_LONGEST_PERIOD = 100_000


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers in their lowest terms: as they are written (0.7 is 7 / 10), or where that takes numbers
    of more than 100,000 in all the nearest that do with less, and at least 1."""
    written = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in written))
    whole = [int(weight * common) for weight in written]
    divisor = gcd(*whole)
    whole = [number // divisor for number in whole]
    if (total := sum(whole)) > _LONGEST_PERIOD:
        whole = [max(1, round(Fraction(number, total) * _LONGEST_PERIOD)) for number in whole]
    return whole


def picks(whole: Sequence[int]) -> NDArray[np.int64]:
    """Which source each sample of a period is from: [sum of the weights]."""
    period, k = sum(whole), len(whole)
    if k == 1:
        return np.zeros(period, np.int64)
    # All is times period x (2k - 2), so that numbers are whole. `behind` is w n - c for the sample that is next.
    scale = 2 * k - 2
    parts = np.array(whole, np.int64)
    behind, found = np.zeros(k, np.int64), np.empty(period, np.int64)
    for n in range(period):
        behind += parts * scale
        # For how many samples more it would not be too far behind, of those that are behind enough.
        patience = np.where(behind >= period, (period * (scale - 1) - behind) // parts, np.iinfo(np.int64).max)
        found[n] = chosen = int(patience.argmin())
        behind[chosen] -= period * scale
    return found


class MixedSamples:
    """Samples of several sources by their weights. Each source goes through its own samples in its own order, and on
    with its next epoch, however long the others are."""

    def __init__(self, sources: Sequence[SampleReader], weights: Sequence[float]) -> None:
        self.sequence = sources[0].sequence
        self._sources = sources
        self._whole = whole_weights(weights)
        self._picks = picks(self._whole)
        self._before = np.empty(len(self._picks), np.int64)  # samples of the same source before each, in its period
        for source in range(len(sources)):
            here = self._picks == source
            self._before[here] = np.arange(here.sum())

    def __len__(self) -> int:
        """Samples after which every source has been gone through once."""
        whole = sum(self._whole)
        return max(-(-len(source) * whole // part) for source, part in zip(self._sources, self._whole, strict=True))

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]. Raises ValueError if `first` or
        `count` is negative."""
        refuse_negative(first, count)
        rounds, places = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._picks))
        chosen = self._picks[places]
        rows = np.empty((count, self.sequence + 1), np.int64)
        for source in np.unique(chosen).tolist():
            here = chosen == source
            numbers = rounds[here] * self._whole[source] + self._before[places[here]]
            # A source's own samples follow each other without a gap.
            rows[here] = self._sources[source].batch(int(numbers[0]), len(numbers))
        return rows

    def shares(self, num_samples: int) -> list[int]:
        """How many of the first samples are of each source."""
        rounds, rest = divmod(num_samples, len(self._picks))
        counts = np.bincount(self._picks[:rest], minlength=len(self._sources)).tolist()
        return [rounds * part + count for part, count in zip(self._whole, counts, strict=True)]
