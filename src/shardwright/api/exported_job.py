"""The result of `export`: a job as files of another training system."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.api.shown import Shown
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, say
from shardwright.config.user_file import system_reason
from shardwright.interchange.exported import Exported, Lacking, exported
from shardwright.interchange.system import System
from shardwright.report.imported_text import exported_notes, nearest_export
from shardwright.report.output import write_output


@dataclass(frozen=True, repr=False)
class ExportedJob(Shown):
    """The files of a training system that start a job, by their names, and what they lack of it."""

    system: System
    result: Exported

    @property
    def files(self) -> dict[str, str]:
        """The text of each file, by its name."""
        return self.result.files

    @property
    def text(self) -> str:
        headings = {name: f"# ---- {name}\n" if len(self.files) > 1 else "" for name in self.files}
        return "".join(headings[name] + text for name, text in self.files.items())

    def notes(self, language: str = ENGLISH) -> str:
        """Notes on parts of the job that the files lack, and on settings that it does not state; a line for each."""
        return exported_notes(self.result, self.system, language)

    def to_dict(self) -> dict[str, Any]:
        left_out, rate = list(self.result.left_out), self.result.unsaid_learning_rate
        return {"files": self.files, "left_out": left_out, "unsaid_learning_rate": rate}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each file."""
        return [{"file": name, "text": text} for name, text in self.files.items()]

    def save(self, folder: str | Path, option: str = "save") -> list[Path]:
        """Write the files into a folder, and return their paths. PlanError, which names the `option` that names the
        folder, if it can't be written to."""
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = say(
                "{option} {folder} can't be made: {reason}; name another folder",
                option=option,
                folder=str(place),
                reason=system_reason(error),
            )
            raise PlanError(say("output"), [fault]) from None
        for name, text in self.files.items():
            write_output(place / name, text, option)
        return [place / name for name in self.files]


def exported_job(system: System, job: JobSpec) -> ExportedJob:
    """A job as files of a system. PlanError with all that the system lacks, and the nearest plan that it has."""
    try:
        return ExportedJob(system, exported(system, job))
    except Lacking as error:
        raise PlanError(error.subject, error.faults, nearest_export(system, job, error)) from None
