"""The weighted scores of benchmarks/truth/README.md, as plain functions."""

from collections import Counter
from collections.abc import Sequence

from shardwright.measure.measured_runs.runs import Measured


def weights_of(rows: Sequence[Measured]) -> list[float]:
    """Weights that are equal for all families, and within a family for all plan groups; their sum is 1."""
    in_group = Counter((row.family, row.group) for row in rows)
    groups = Counter(family for family, _ in in_group)
    return [1.0 / in_group[row.family, row.group] / groups[row.family] / len(groups) for row in rows]


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted mean; 0 if there are no values."""
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0


def percentile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the weight does not exceed."""
    half = share * sum(weights)
    passed = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        passed += weight
        if passed >= half - 1e-12:
            return value
    return 0.0


def share_within(values: Sequence[float], weights: Sequence[float], limit: float) -> float:
    """Share of the weight of values that are at most `limit`."""
    return weighted_mean([float(value <= limit) for value in values], weights)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation: pairs in the same order minus pairs in opposite order, over all pairs without ties in `first`.

    Kendall 1938, tau-a; 1 for the same order.
    """
    concordance = pairs = 0
    for i in range(len(first)):
        for j in range(i):
            difference = (first[i] - first[j]) * (second[i] - second[j])
            if first[i] != first[j]:
                pairs += 1
                concordance += (difference > 0) - (difference < 0)
    return concordance / pairs if pairs else 1.0
