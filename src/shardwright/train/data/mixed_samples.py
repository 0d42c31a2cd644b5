"""Several sources mixed into one sequence of samples, exactly by weight, and without computing the samples before.

After n samples, a source of weight w (weights sum to 1) has given less than one sample more or fewer than w n; with two
sources, the whole number nearest to w n. The order follows Tijdeman's rule ("The chairman assignment problem", 1980):
of k sources, those that are behind by 1 / (2k - 2) or more are candidates, and the candidate is next that would be too
far behind soonest.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from shardwright.train.data.samples import SampleReader, refuse_negative

# The order repeats after as many samples as the sum of the weights as whole numbers. Weights that need a longer period
# are rounded.
_LONGEST_PERIOD = 100_000


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers without a common divisor, each at least 1. They are exact, with 0.7 as 7 / 10, unless
    their sum would exceed 100,000; then they are rounded."""
    fractions = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in fractions))
    integers = [int(weight * common) for weight in fractions]
    divisor = gcd(*integers)
    integers = [number // divisor for number in integers]
    if (total := sum(integers)) > _LONGEST_PERIOD:
        integers = [max(1, round(Fraction(number, total) * _LONGEST_PERIOD)) for number in integers]
    return integers


def picks(weights: Sequence[int]) -> NDArray[np.int64]:
    """The source of each sample of a period, from whole weights: [sum of the weights]."""
    period, k = sum(weights), len(weights)
    if k == 1:
        return np.zeros(period, np.int64)
    # All numbers are multiplied by period x (2k - 2), so that they are whole. `lag` is w n - c of each source, with the
    # number n of the next sample, and c samples given so far.
    scale = 2 * k - 2
    parts = np.array(weights, np.int64)
    lag, order = np.zeros(k, np.int64), np.empty(period, np.int64)
    for n in range(period):
        lag += parts * scale
        # How many more samples each candidate can wait until it is too far behind.
        patience = np.where(lag >= period, (period * (scale - 1) - lag) // parts, np.iinfo(np.int64).max)
        order[n] = chosen = int(patience.argmin())
        lag[chosen] -= period * scale
    return order


class Mixture:
    """The order of several sources by their weights: a period that repeats."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = whole_weights(weights)
        self._picks = picks(self.weights)
        # The number of each sample of a period among the samples of its source.
        self._numbers = np.empty(len(self._picks), np.int64)
        for source in range(len(self.weights)):
            is_picked = self._picks == source
            self._numbers[is_picked] = np.arange(is_picked.sum())

    def owners(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sources of samples first, first + 1, ..., and the numbers of these samples in their sources, both
        [count]."""
        rounds, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._picks))
        owners = self._picks[positions]
        return owners, rounds * np.array(self.weights, np.int64)[owners] + self._numbers[positions]

    def shares(self, num_samples: int) -> list[int]:
        """The number of the first `num_samples` samples that come from each source."""
        rounds, num_remaining = divmod(num_samples, len(self._picks))
        counts = np.bincount(self._picks[:num_remaining], minlength=len(self.weights)).tolist()
        return [rounds * part + count for part, count in zip(self.weights, counts, strict=True)]


class MixedSamples:
    """Samples of several sources by their weights. Each source gives its samples in its own order, epoch after epoch,
    independent of the length of the others.

    A run may have consumed samples of other sources, or with other weights, before: this mixture begins with sample
    number `begun` of the run, and each source continues after its first `firsts` samples.
    """

    def __init__(
        self, sources: Sequence[SampleReader], weights: Sequence[float], begun: int = 0, firsts: Sequence[int] = ()
    ) -> None:
        self.sequence = sources[0].sequence
        self._sources, self._begun, self._firsts = sources, begun, firsts or [0] * len(sources)
        self._mixture = Mixture(weights)

    def __len__(self) -> int:
        """The number of samples after which every source has completed an epoch."""
        weights = self._mixture.weights
        return max(-(-len(source) * sum(weights) // part) for source, part in zip(self._sources, weights, strict=True))

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]. Raises ValueError if `first` is less
        than `begun`, or `count` is negative."""
        refuse_negative(first - self._begun, count)
        owners, numbers = self._mixture.owners(first - self._begun, count)
        rows = np.empty((count, self.sequence + 1), np.int64)
        for source in np.unique(owners).tolist():
            is_owned = owners == source
            # The numbers of a source's samples are consecutive.
            first_number = self._firsts[source] + int(numbers[is_owned][0])
            rows[is_owned] = self._sources[source].batch(first_number, int(is_owned.sum()))
        return rows
