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
    """The source of each sample of a period: [sum of the weights]."""
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


class Mixture:
    """The order of several sources by their weights: a period, again and again."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.whole = whole_weights(weights)
        self._picks = picks(self.whole)
        self._before = np.empty(len(self._picks), np.int64)  # samples of the same source before each, in its period
        for source in range(len(self.whole)):
            here = self._picks == source
            self._before[here] = np.arange(here.sum())

    def owners(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sources that samples first, first + 1, ... are from, and their numbers in these, both [count]."""
        rounds, places = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._picks))
        owners = self._picks[places]
        return owners, rounds * np.array(self.whole, np.int64)[owners] + self._before[places]

    def shares(self, num_samples: int) -> list[int]:
        """How many of the first samples are of each source."""
        rounds, rest = divmod(num_samples, len(self._picks))
        counts = np.bincount(self._picks[:rest], minlength=len(self.whole)).tolist()
        return [rounds * part + count for part, count in zip(self.whole, counts, strict=True)]


class MixedSamples:
    """Samples of several sources by their weights. Each source goes through its own samples in its own order, and on
    with its next epoch, however long the others are.

    A run may have had samples before, of other sources or by other weights: these begin with its sample number `begun`,
    and each goes on behind the `firsts` of its own.
    """

    def __init__(
        self, sources: Sequence[SampleReader], weights: Sequence[float], begun: int = 0, firsts: Sequence[int] = ()
    ) -> None:
        self.sequence = sources[0].sequence
        self._sources, self._begun, self._firsts = sources, begun, firsts or [0] * len(sources)
        self._mixture = Mixture(weights)

    def __len__(self) -> int:
        """Samples after which every source has been gone through once."""
        whole = self._mixture.whole
        return max(-(-len(source) * sum(whole) // part) for source, part in zip(self._sources, whole, strict=True))

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]. Raises ValueError if `first` is less
        than `begun`, or `count` is negative."""
        refuse_negative(first - self._begun, count)
        owners, numbers = self._mixture.owners(first - self._begun, count)
        rows = np.empty((count, self.sequence + 1), np.int64)
        for source in np.unique(owners).tolist():
            here = owners == source
            # A source's own samples follow each other without a gap.
            rows[here] = self._sources[source].batch(self._firsts[source] + int(numbers[here][0]), int(here.sum()))
        return rows
