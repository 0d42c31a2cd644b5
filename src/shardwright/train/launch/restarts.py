"""Restarts local ranks after a failure, if the run writes checkpoints from which they can resume.

For ranks of torchrun, torchelastic's agent does this. Local ranks do not use it: their server forks them in a fraction
of a second, but the agent starts interpreters; and they end with their launcher, however it ends.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.config.base import error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.train.launch.launch import RankFailedError, check_machine, run_once
from shardwright.train.launch.preemption import Preemption
from shardwright.train.launch.rank_life import OF_ALL_RANKS, Work

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0


class Restarts:
    """The number and delays of restarts: at most `limit` within any `window_s` seconds. Each restart within the window
    has twice the delay of the previous one."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self.total = 0
        self._times_s: list[float] = []

    def delay_s(self, now_s: float) -> float | None:
        """Count a failure at `now_s`. Returns the seconds to wait before the restart, or None if the limit is
        reached."""
        self._times_s = [time_s for time_s in self._times_s if now_s - time_s < self.window_s]
        if len(self._times_s) >= self.limit:
            return None
        self._times_s.append(now_s)
        self.total += 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(self._times_s) - 1))

    def of_window(self) -> int:
        """The number of restarts within the window before the last failure."""
        return len(self._times_s)


def launch_with_restarts(
    work: Work,
    job: JobSpec,
    folder: Path,
    preemption: Preemption,
    tell: Callable[[RankFailedError, str], None],
    num_threads: int = 0,
) -> list[Any]:
    """Run `work` on every rank of the job's plan, on this machine, as `launch` does. If a rank fails, all ranks are
    restarted, and `work` resumes from what it has saved; `tell` gets the failure and a line about the restart.

    A failure that every rank finds would come again, and is raised at once; so is a failure after a request to leave.
    """
    check_machine(job, folder)
    restarts = Restarts(job.run.max_restarts, job.run.restart_window_s)
    while True:
        try:
            return run_once(work, job, folder, num_threads, preemption)
        except RankFailedError as error:
            failure = error.failure
            would_come_again = failure is not None and failure.kind in OF_ALL_RANKS
            if would_come_again or preemption.signal is not None or restarts.limit == 0:
                raise
            delay_s = restarts.delay_s(time.monotonic())
            if delay_s is None:
                message = say("{fault}\n{limit}", fault=error_text(error), limit=_limit_message(restarts))
                raise RankFailedError(message, failure) from None
            words = say(
                "restart {number} of {limit} within {window:g} s, in {delay:g} s",
                number=restarts.of_window(),
                limit=restarts.limit,
                window=restarts.window_s,
                delay=delay_s,
            )
            tell(error, words)
        time.sleep(delay_s)


def _limit_message(restarts: Restarts) -> str:
    times = counted_phrase(restarts.limit, "time")
    if restarts.total > restarts.limit:
        return say(
            "ranks were started anew {times} within {window:g} s ({total} in all), which is what run.max_restarts and "
            "run.restart_window_s allow",
            times=times,
            window=restarts.window_s,
            total=restarts.total,
        )
    return say(
        "ranks were started anew {times} within {window:g} s, which is what run.max_restarts and run.restart_window_s "
        "allow",
        times=times,
        window=restarts.window_s,
    )
