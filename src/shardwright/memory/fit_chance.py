"""The chance that a plan of software other than ours fits, from how far predicted memory is off where it was measured.

The log of needed over predicted bytes is taken to be normal around 0. `shardwright validate` says
how many of the measured plans with a high, an open and a low chance ran.
"""

import math
from statistics import NormalDist

# The chance from which a plan is said to fit surely. A plan that runs out of memory costs more than one that is a few
# percent slower; and where memory is short, allocators free and ask again, which takes time.
SURE = 0.8
# Standard deviation of the log of needed over predicted bytes (benchmarks/fit_memory_spread.py).
SPREAD = 0.065


def fit_chance(needed_bytes: float, offered_bytes: float, spread: float = SPREAD) -> float:
    """The chance that a process fits which is predicted to need so many bytes of those that its device offers."""
    if needed_bytes <= 0:
        return 1.0
    if offered_bytes <= 0:
        return 0.0
    return 0.5 * math.erfc(math.log(needed_bytes / offered_bytes) / (spread * math.sqrt(2)))


def most_needed_bytes(offered_bytes: float, chance: float) -> float:
    """The largest need that still fits with this chance, above 0 and below 1: the inverse of `fit_chance`."""
    return offered_bytes * math.exp(-SPREAD * NormalDist().inv_cdf(chance))
