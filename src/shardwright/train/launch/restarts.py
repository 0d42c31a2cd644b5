"""Local ranks that are started anew after a failure, where the run writes checkpoints to go on from.

torchelastic's agent does the same for ranks of torchrun. Local ranks do without it: their server forks them in a
fraction of a second where the agent starts interpreters, and they end with their launcher however that ends.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.train.launch.launch import RankFailedError, check_machine, run_once
from shardwright.train.launch.preemption import Preemption
from shardwright.train.launch.rank_life import OF_ALL_RANKS, Work

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0


class Restarts:
    """How often and when ranks are started anew: at most `most` times within any `window_s` seconds, each time within
    that window after twice the delay of the one before."""

    def __init__(self, most: int, window_s: float) -> None:
        self.most = most
        self.window_s = window_s
        self.total = 0
        self._times_s: list[float] = []

    def delay_s(self, now_s: float) -> float | None:
        """Note a failure at `now_s`. Returns the seconds to wait before the restart, or None if there is none left."""
        self._times_s = [time_s for time_s in self._times_s if now_s - time_s < self.window_s]
        if len(self._times_s) >= self.most:
            return None
        self._times_s.append(now_s)
        self.total += 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(self._times_s) - 1))

    def of_window(self) -> int:
        """Restarts within the window, as of the last failure."""
        return len(self._times_s)


def launch_with_restarts(
    work: Work,
    job: JobSpec,
    folder: Path,
    preemption: Preemption,
    tell: Callable[[RankFailedError, str], None],
    num_threads: int = 0,
) -> list[Any]:
    """Run `work` on every rank of the job's plan, on this machine, as `launch` does. If a rank fails, `tell` why and
    that all are started anew: `work` goes on from what it has saved.

    What every rank finds alike would come again, and raises at once. So does a failure after a request to leave.
    """
    check_machine(job, folder)
    restarts = Restarts(job.run.max_restarts, job.run.restart_window_s)
    while True:
        try:
            return run_once(work, job, folder, num_threads, preemption)
        except RankFailedError as error:
            failure = error.failure
            would_come_again = failure is not None and failure.kind in OF_ALL_RANKS
            if would_come_again or preemption.signal is not None or restarts.most == 0:
                raise
            delay_s = restarts.delay_s(time.monotonic())
            if delay_s is None:
                raise RankFailedError(f"{error}\n{_limit(restarts)}", failure) from None
            tell(
                error,
                f"restart {restarts.of_window()} of {restarts.most} within {restarts.window_s:g} s, in {delay_s:g} s",
            )
        time.sleep(delay_s)


def _limit(restarts: Restarts) -> str:
    more = f" ({restarts.total} in all)" if restarts.total > restarts.most else ""
    return (
        f"ranks were started anew {counted(restarts.most, 'time')} within {restarts.window_s:g} s{more}, which is what "
        "run.max_restarts and run.restart_window_s allow"
    )
