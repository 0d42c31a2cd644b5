"""How far a search has come: records of a logger, which a program may listen to.

Each record has `share`, of the whole work that an answer takes, and as its message the phase.
"""

import logging
from enum import Enum

LOGGER = logging.getLogger("shardwright.progress")


class Phase(Enum):
    """A phase of an answer: its words, and the share of the work that usually lies before it and at its end."""

    PRICING = "pricing plans", 0.1, 0.25
    SIMULATING = "simulating the best of each kind", 0.25, 0.9
    COMPARING = "comparing plans beside the best", 0.9, 0.95
    EXPLAINING = "explaining", 0.95, 1.0


def tell(phase: Phase, share: float) -> None:
    """Record that a share of a phase is done."""
    words, begin, end = phase.value
    LOGGER.info(words, extra={"share": begin + share * (end - begin)})
