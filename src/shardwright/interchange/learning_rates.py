"""The lowest learning rate of a schedule, as other software says it, and as a share of the highest: as people write
them, without the last digits of a product or quotient."""

_DIGITS = 12


def lowest_rate(rate: float, ratio: float) -> float:
    """The lowest learning rate: a share of the highest."""
    return float(f"{rate * ratio:.{_DIGITS}g}")


def lowest_ratio(rate: float, lowest: float) -> float:
    """The share of the highest learning rate that the lowest is, 1 at most."""
    return min(1.0, float(f"{lowest / rate:.{_DIGITS}g}"))
