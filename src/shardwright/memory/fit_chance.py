"""The chance that a plan of software other than ours fits, from how far predicted memory is off where it was measured.

The log of needed over predicted bytes, over its spread, is taken to have Student's distribution with two degrees of
freedom around 0. Most predictions are near and a few are far off, for causes that no account knows; under a normal
distribution these few would have no chance at all. `shardwright validate` says how many of the measured plans with a
high, an open and a low chance ran.
"""

import math

# The chance from which a plan is said to fit surely. A plan that runs out of memory costs more than one that is a few
# percent slower; and where memory is short, allocators free and ask again, which takes time.
SURE = 0.8
# Spreads of the log of needed over predicted bytes where a plan's software is described, and where nothing says what
# runs it (benchmarks/fit_memory_spread.py).
SPREAD, UNNAMED_SPREAD = 0.06, 0.25


def fit_chance(needed_bytes: float, offered_bytes: float, spread: float = SPREAD) -> float:
    """The chance that a process fits which is predicted to need so many bytes of those that its device offers."""
    if needed_bytes <= 0:
        return 1.0
    if offered_bytes <= 0:
        return 0.0
    room = math.log(offered_bytes / needed_bytes) / spread
    return 0.5 + 0.5 * room / math.hypot(room, math.sqrt(2))


def most_needed_bytes(offered_bytes: float, chance: float, spread: float = SPREAD) -> float:
    """The largest need that still fits with this chance, above 0 and below 1: the inverse of `fit_chance`."""
    room = (2 * chance - 1) / math.sqrt(2 * chance * (1 - chance))
    return offered_bytes * math.exp(-spread * room)
