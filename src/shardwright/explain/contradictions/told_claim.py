"""A claim that is commonly told, and the check that holds it against a job."""

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase


@dataclass(frozen=True)
class ToldClaim:
    """A claim. `check` returns the arithmetic of a job that the claim is about, or None if the job has nothing to do
    with it."""

    name: str
    told: Phrase
    check: Callable[[JobSpec], Phrase | None]


@dataclass(frozen=True)
class Contradiction:
    """A claim that touches a job, and what holds for that job."""

    name: str
    told: Phrase
    holds: Phrase
