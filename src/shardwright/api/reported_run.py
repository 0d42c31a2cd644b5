"""The report that a run leaves in its folder, and the command that makes it anew.

A report is beside the point of a run: whatever goes wrong with it is a warning, and never ends the run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright import __version__
from shardwright.config.base import PlanError, RunError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, language_of_locale, say
from shardwright.config.run_file_names import CARD, METRICS, REPORT
from shardwright.report.run.run_card import RunCard, Status
from shardwright.train.run_files import open_to_append, write_anew

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwright.parallel.pipeline.action_times import Performed

_MOST_ACTIONS = 20_000  # of a step whose times are kept


class ReportedRun:
    """A run from its beginning to its end, whose card and report are kept in its folder. `warn` prints what goes
    wrong with them."""

    def __init__(self, job: JobSpec, warn: "Callable[[str], None]") -> None:
        self._job, self._warn = job, warn
        self._folder = Path()
        self._card: RunCard | None = None
        self._earlier: str | None = None  # the card of an earlier run in the folder

    def begin(self, folder: Path) -> None:
        """Write the card of a run that begins, into its folder."""
        self._folder = folder
        with suppress(OSError, UnicodeDecodeError):
            self._earlier = (folder / CARD).read_text(encoding="utf-8")
        try:
            self._card = RunCard.begun(self._job, __version__)
            self._card.write(folder)
        except Exception as error:  # a report never ends a run
            self._note(say("{folder} has no card of this run: {reason}", folder=str(folder), reason=error_text(error)))

    @contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """A context whose RunError is in the report of the run. A run that is refused by its ranks was none, and leaves
        the card of the earlier run in the folder as it was."""
        try:
            yield
        except PlanError:
            if self._card is not None and self._earlier is not None:
                with suppress(OSError):
                    write_anew(self._folder / CARD, self._earlier)
            raise
        except RunError as error:
            self.end("failed", str(error))
            raise

    def end(self, status: Status, failure: str = "") -> Path | None:
        """Write the report of a run that has ended, and its card. Returns the report; None if there is none, as of a
        run that recorded nothing."""
        if self._card is None:
            return None
        from shardwright.report.run.run_report import write_report  # needs numpy, which a run that begins does not

        card = self._card.ended_as(status, failure)
        try:
            if not (self._folder / METRICS).exists():  # it failed before its first line
                card.write(self._folder)
                return None
            write_report(self._folder, card, language_of_locale())
        except Exception as error:  # a report never ends a run
            self._note(
                say("{folder} has no report of this run: {reason}", folder=str(self._folder), reason=error_text(error))
            )
            return None
        return self._folder / REPORT

    def keep_times(self, rows: "Mapping[int, Sequence[Performed]]") -> None:
        """Record the times of the actions of a step, by pipeline rank, if all ranks of a pipeline are there."""
        num_actions = sum(map(len, rows.values()))
        if sorted(rows) != list(range(self._job.plan.pp)) or num_actions > _MOST_ACTIONS:
            return
        try:
            spans = _spans_s([rows[rank] for rank in sorted(rows)])
            with open_to_append(self._folder / METRICS) as file:
                file.write(json.dumps({"performed": {"rows": spans}}) + "\n")
        except Exception as error:  # a report never ends a run
            self._note(say("the report has no timeline of a performed step: {reason}", reason=error_text(error)))

    def _note(self, text: str) -> None:
        with suppress(OSError):  # nobody reads it
            self._warn(f"note: {text}")


def _spans_s(rows: "Sequence[Sequence[Performed]]") -> list[list[list[float]]]:
    """Start and end of each action, by pipeline rank, in seconds from the first one's start."""
    from shardwright.parallel.pipeline.action_times import times_of_step

    times = times_of_step(rows)
    return [
        [[round(start, 7), round(end, 7)] for start, end in zip(*row, strict=True)]
        for row in zip(times.start, times.end, strict=True)
    ]


def report_page(folder: Path, language: str = ENGLISH) -> tuple[RunCard, str]:
    """The card of a run, with what it has recorded so far, and its report as HTML, in a language. Raises PlanError."""
    from shardwright.report.run.run_record import read_record
    from shardwright.report.run.run_report import report_html

    record = read_record(folder)
    card = RunCard.read(folder).with_record(record)
    return card, report_html(card, record, folder, language)
