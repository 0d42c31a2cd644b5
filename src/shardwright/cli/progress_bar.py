"""A bar on standard error for work of more than a second: what is being done, its share and the time left."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.config.units import seconds_text

_LEAST_SHARE = 0.1  # of the work, from which on the time left is told
_PATIENCE_S = 1.0  # work that takes less shows nothing


def is_watched() -> bool:
    """True if somebody sees standard error on a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_shown() -> Iterator[None]:
    """A context in which the records of a search move a bar; it is erased at the end. Nothing is shown where standard
    error is no terminal."""
    if not is_watched():
        yield
        return
    from shardwright.planner.search.search_progress import LOGGER

    bar = _Bar()
    level = LOGGER.level
    LOGGER.addHandler(bar)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(bar)
        LOGGER.setLevel(level)
        bar.close()


class _Bar(logging.Handler):
    """A handler of records with a `share`, which draws them as a bar. A share that falls begins another search."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__()
        self._begin_s = time.monotonic()
        self._share = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=1.0, left="")

    def emit(self, record: logging.LogRecord) -> None:
        """Move the bar."""
        if not self._progress.live.is_started:
            if time.monotonic() - self._begin_s < _PATIENCE_S:
                return
            self._progress.start()
        share = float(getattr(record, "share", 0.0))
        if share < self._share:
            self._begin_s = time.monotonic()
            self._progress.reset(self._task)
        self._share = share
        left_s = (time.monotonic() - self._begin_s) * (1 - share) / max(share, _LEAST_SHARE)
        words = f"about {seconds_text(round(left_s))} left" if share > _LEAST_SHARE and left_s >= 1 else ""
        self._progress.update(self._task, completed=share, description=record.getMessage(), left=words)

    def close(self) -> None:
        """Erase the bar."""
        self._progress.stop()
        super().close()
