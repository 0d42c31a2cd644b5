"""Signs of life on standard error, for work of more than a second: what is being done, its share, the time left, and
the best plan so far."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwright.config.phrase import ENGLISH, Phrase, in_language, say
from shardwright.config.progress_records import LOGGER
from shardwright.config.units import seconds_text

if TYPE_CHECKING:
    from rich.console import Group

_LEAST_SHARE = 0.1  # of the work, from which on the time left is told
_PATIENCE_S = 1.0  # work that takes less shows nothing


def is_watched() -> bool:
    """True if somebody sees standard error on a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_shown(language: str = ENGLISH) -> Iterator[None]:
    """A context in which records of progress move a bar, whose words are in a language; it is erased at the end.
    Nothing is shown where standard error is no terminal."""
    if not is_watched():
        yield
        return
    with _heard(_Bar(language)):
        yield


@contextmanager
def search_shown(language: str = ENGLISH) -> Iterator[None]:
    """A context in which the best plan so far stands above a bar. Where standard error is no terminal, the first one
    after a second is a line of it, of each part of the work."""
    with _heard(_Bar(language) if is_watched() else _FirstPlans(language)):
        yield


@contextmanager
def _heard(handler: "_Bar | _FirstPlans") -> Iterator[None]:
    """A context in which a handler hears records of progress."""
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        handler.close()


def _best_words(record: logging.LogRecord) -> str:
    """The best plan so far, in words; empty for a record of a share."""
    best = getattr(record, "best", None)
    if best is None:
        return ""
    from shardwright.report.plans_text import job_words, step_text

    step, plan = step_text(getattr(record, "step_s", 0.0)), job_words(best)
    words = say("So far: {step} a step with {plan}", step=step, plan=plan)
    if getattr(record, "is_bound", False):
        words = say("So far: at least {step} a step with {plan}", step=step, plan=plan)
    return say("{best}, if it fits", best=words) if getattr(record, "may_not_fit", False) else words


def _words(record: logging.LogRecord) -> str:
    """The words of a record, which may be a phrase."""
    return record.msg if isinstance(record.msg, Phrase) else record.getMessage()


class _FirstPlans(logging.Handler):
    """A handler that writes the best plan so far once for each part of the work, if its search still goes on after a
    second."""

    def __init__(self, language: str) -> None:
        super().__init__()
        self._language = language
        self._begin("")

    def _begin(self, part_words: str) -> None:
        """Wait for the first plan of a part, or of work without parts."""
        self._part_words, self._best, self._is_written = part_words, "", False
        self._begin_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Begin a part, keep the plan, or write it."""
        if (part := getattr(record, "part", None)) is not None:
            number, count = part[0] + 1, part[1]
            self._begin(say("{part} ({number} of {count}). ", part=_words(record), number=number, count=count))
        self._best = _best_words(record) or self._best
        if self._best and not self._is_written and time.monotonic() - self._begin_s >= _PATIENCE_S:
            self._is_written = True
            line = say("{part}{best}; looking for better ones", part=self._part_words, best=self._best)
            from shardwright.report.document import Paragraph, part_text

            print(part_text(Paragraph((line,), hang="  "), self._language), file=sys.stderr, flush=True)


class _Bar(logging.Handler):
    """A handler of records of progress, which draws them as a bar. Without parts, a share that falls begins another
    search."""

    def __init__(self, language: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__()
        self._begin_s, self._language = time.monotonic(), language
        self.share, self._part, self._part_words = 0.0, (0, 1), ""
        self._best = ""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=1.0, left="")
        self._live = Live(get_renderable=self._screen, console=console, transient=True, refresh_per_second=8)
        self._guard, self._is_closed = threading.Lock(), False
        self._timer = threading.Timer(_PATIENCE_S, self._begin)  # there may be no record for long
        self._timer.daemon = True
        self._timer.start()

    def _screen(self) -> "Group":
        """The best plan so far, cut to a line, and the bar."""
        from rich.console import Group
        from rich.text import Text

        parts = [Text(in_language(self._best, self._language), no_wrap=True, overflow="ellipsis")] if self._best else []
        return Group(*parts, self._progress)

    def _begin(self) -> None:
        """Show the bar, unless it is shown or the work has ended."""
        with self._guard:
            if not (self._is_closed or self._live.is_started):
                self._live.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Move the bar."""
        if time.monotonic() - self._begin_s >= _PATIENCE_S:
            self._begin()
        self._best = _best_words(record) or self._best
        words, share = _words(record), getattr(record, "share", None)
        if (part := getattr(record, "part", None)) is not None:
            self._part, self._part_words, words, share = part, words, "", 0.0
        if share is None:
            return
        number, num_parts = self._part
        total = (number + float(share)) / num_parts
        if total < self.share and num_parts == 1:
            self._begin_s = time.monotonic()
            self._progress.reset(self._task)
        self.share = total if num_parts == 1 else max(total, self.share)
        left_s = (time.monotonic() - self._begin_s) * (1 - self.share) / max(self.share, _LEAST_SHARE)
        left: str = ""
        if self.share > _LEAST_SHARE and left_s >= 1:
            left = say("about {seconds} left", seconds=seconds_text(round(left_s)))
        doing: str = say("{listed}", listed=tuple(filter(None, (self._part_words, words))))
        doing, left = (in_language(text, self._language) for text in (doing, left))
        self._progress.update(self._task, completed=self.share, description=doing, left=left)

    def close(self) -> None:
        """Erase the bar."""
        self._timer.cancel()
        with self._guard:
            self._is_closed = True
        self._live.stop()
        super().close()
