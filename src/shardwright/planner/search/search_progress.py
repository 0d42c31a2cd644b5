"""The progress of a search, and its best plan so far: records of `config/progress_records.py`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.progress_records import LOGGER, tell_share


class Phase(Enum):
    """A phase of an answer: its words, and the share of the work that usually lies before it and at its end."""

    PRICING = say("pricing plans"), 0.1, 0.25
    SIMULATING = say("simulating the best of each kind"), 0.25, 0.9
    COMPARING = say("comparing plans beside the best"), 0.9, 0.95
    EXPLAINING = say("explaining"), 0.95, 1.0


def tell(phase: Phase, share: float) -> None:
    """Record that a share of a phase is done."""
    words, begin, end = phase.value
    tell_share(words, begin + share * (end - begin))


@contextmanager
def untold() -> Iterator[None]:
    """Record nothing of a search within it: one more, whose plans may not count."""

    def none(_: logging.LogRecord) -> bool:
        return False

    LOGGER.addFilter(none)
    try:
        yield
    finally:
        LOGGER.removeFilter(none)


def tell_best(job: Callable[[], JobSpec], token_s: float, *, may_not_fit: bool = False) -> None:
    """Record the best simulated plan so far: the job under it, which is made only if somebody listens, and seconds of
    its step. It `may_not_fit` until the exact account of its memory is made."""
    _tell_plan(job, token_s, is_bound=False, may_not_fit=may_not_fit)


def tell_bound(job: Callable[[], JobSpec], token_s: float) -> None:
    """Record the best plan by closed forms: seconds that its step takes at least. The exact account may still find that
    it does not fit."""
    _tell_plan(job, token_s, is_bound=True, may_not_fit=True)


def _tell_plan(job: Callable[[], JobSpec], token_s: float, *, is_bound: bool, may_not_fit: bool) -> None:
    if LOGGER.isEnabledFor(logging.INFO):
        best = job()
        step_s = token_s * best.tokens_per_step
        LOGGER.info(
            "best plan so far",
            extra={"best": best, "step_s": step_s, "is_bound": is_bound, "may_not_fit": may_not_fit},
        )
