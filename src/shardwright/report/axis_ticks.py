"""Round numbers for axes."""

import math


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... (or 0.5, 0.2, ...) that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))
