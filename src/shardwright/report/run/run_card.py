"""The card of a run, `report.json` in its folder: what one needs to do it again and to check what is said of it.

It is written when a run begins and again at its end, so that a run which was killed has one, too.
"""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from shardwright.config.base import PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.phrase import say
from shardwright.config.run_file_names import CARD
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text, system_reason
from shardwright.report.run.run_record import RunRecord
from shardwright.train.run_files import write_anew

FORMAT = 1
_PACKAGES = ("torch", "numpy")
_GIT_S = 2.0  # a checkout on a slow disk does without its commit
_MOST_BYTES = 8 * MIB

Status = Literal["running", "done", "preempted", "failed"]


@dataclass(frozen=True)
class RunCard:
    """A run in facts. `commit` is that of the checkout which this package is in, None for an installed one. `data` has
    digests of the tokens by path. `compared` is the last comparison of rank 0, each number [predicted, measured];
    `done_again` are steps that were done before and after a resume, with `bit_exact` losses or not."""

    job: dict[str, Any]
    job_sha256: str
    ranks: int
    command: str
    commit: str | None
    has_changes: bool | None
    versions: dict[str, str]
    system: str
    began: str
    format: int = FORMAT
    status: Status = "running"
    failure: str = ""
    ended: str | None = None
    device: str = ""
    data: dict[str, str] = field(default_factory=dict)
    steps: int | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    median_step_s: float | None = None
    peak_memory_bytes: int | None = None
    compared: dict[str, Any] | None = None
    done_again: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begun(cls, job: JobSpec, version: str, command: Sequence[str] = ()) -> "RunCard":
        """The card of a run that begins now under a version of Shardwright, by a command: that of this process if it is
        empty."""
        fields = job.model_dump(mode="json")
        commit, has_changes = _commit(Path(__file__).parents[2])
        versions = {"shardwright": version, "python": platform.python_version()}
        return cls(
            job=fields,
            job_sha256=sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest(),
            ranks=job.plan.world,
            command=shlex.join(command or (_program(sys.argv[0]), *sys.argv[1:])),
            commit=commit,
            has_changes=has_changes,
            versions=versions | {name: metadata.version(name) for name in _PACKAGES},
            system=platform.platform(),
            began=_now(),
        )

    @classmethod
    def read(cls, folder: Path) -> "RunCard":
        """The card in the folder of a run. Raises PlanError if there is none, or if it is damaged."""
        path, fault = folder / CARD, ""
        try:
            values = json.loads(read_text(path, _MOST_BYTES))
            return cls(**values)
        except FileNotFoundError:
            fault = say(
                "there is no {path}; name the folder of a run that this version began, such as runs/quickstart",
                path=str(path),
            )
        except FileFault as error:
            fault = error_text(error)
        except OSError as error:
            fault = say(
                "{path} can't be read: {reason}; name the folder of a run", path=str(path), reason=system_reason(error)
            )
        except (ValueError, TypeError, RecursionError):
            fault = say("{path} is no card of a run as this version writes it; train the run again", path=str(path))
        raise PlanError(say("run {folder}", folder=str(folder)), [fault])

    def with_record(self, record: RunRecord) -> "RunCard":
        """The card with what the run recorded."""
        return replace(
            self,
            device=record.device,
            data=dict(record.data),
            steps=record.last_step,
            loss=record.last("loss"),
            held_out_loss=record.last("held_out"),
            median_step_s=record.median("step_s"),
            peak_memory_bytes=record.peak_memory_bytes,
            compared=record.compared,
            done_again=list(record.done_again),
        )

    def ended_as(self, status: Status, failure: str = "") -> "RunCard":
        """The card of the run when it has ended."""
        return replace(self, status=status, failure=failure, ended=_now())

    def write(self, folder: Path) -> None:
        """Write the card into the run's folder. Raises OSError."""
        write_anew(folder / CARD, json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """The card as JSON. Bytes, seconds, nats a token; null is unknown."""
        return asdict(self)

    def checked_job(self) -> JobSpec:
        """The job of the run. Raises PlanError if this version has no such job."""
        return make_job(self.job, f"job {self.job.get('name', '')}")


def _program(path: str) -> str:
    """The name by which a user calls a program."""
    name = Path(path).name
    return "shardwright" if name == "__main__.py" else name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout that has a folder, and True if files differ from it; None for both elsewhere."""
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout
