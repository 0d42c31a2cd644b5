"""The chance that a plan of software other than ours fits, from how far predicted memory is off where it was measured.

The log of needed over predicted bytes is taken to be normal around 0. `shardwright validate` says
how many of the measured plans with a high, an open and a low chance ran.
"""

import math

SPREAD = 0.1  # standard deviation of the log of needed over predicted bytes


def fit_chance(needed_bytes: float, offered_bytes: float) -> float:
    """The chance that a process fits which is predicted to need so many bytes of those that its device offers."""
    if needed_bytes <= 0:
        return 1.0
    if offered_bytes <= 0:
        return 0.0
    return 0.5 * math.erfc(math.log(needed_bytes / offered_bytes) / (SPREAD * math.sqrt(2)))
