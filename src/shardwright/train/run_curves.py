"""Curves of a run beside metrics.jsonl: TensorBoard, and if the job asks for them Prometheus and Weights & Biases."""

import re
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.run_file_names import BOARD
from shardwright.train.launch.full_disk import telling_of_full_disk
from shardwright.train.run_files import write_anew

_EVERY_S = 1.0  # between files of Prometheus, which is asked every few seconds
_PREFIX = "shardwright_"


class RunCurves(Protocol):
    """A place for points of curves by step."""

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve. Raises RunError if the disk is full."""

    def go_back(self, step: int) -> None:
        """Go on after this step: later points don't count any more."""

    def close(self) -> None:
        """Write what is left to write."""


def run_curves(job: JobSpec, folder: Path, first_step: int) -> list[RunCurves]:
    """All curves of a run, which goes on after `first_step` steps."""
    curves: list[RunCurves] = [BoardCurves(folder / BOARD, first_step)]
    if job.run.prometheus:
        curves.append(PrometheusFile(Path(job.run.prometheus).expanduser(), job.name))
    if job.run.wandb != "off":
        curves.append(WandbCurves(job, folder))
    return curves


def curve_faults(job: JobSpec) -> list[str]:
    """Faults of curves that this machine can't write."""
    faults = list[str]()
    if job.run.wandb != "off" and not _is_installed("wandb"):
        faults.append(
            say(
                "run.wandb is \"{wandb}\", and the package wandb is not installed: pip install 'shardwright[wandb]'",
                wandb=job.run.wandb,
            )
        )
    if job.run.prometheus and not (place := Path(job.run.prometheus).expanduser().parent).is_dir():
        faults.append(
            say("run.prometheus: there is no folder {place}; make it, or name a file in another", place=place)
        )
    return faults


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


class BoardCurves:
    """TensorBoard's files."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, on rank 0 alone

        with telling_of_full_disk(self._folder):
            self._board = SummaryWriter(str(self._folder), purge_step=first_step + 1 if first_step else None)

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        with telling_of_full_disk(self._folder):
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def go_back(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        with telling_of_full_disk(self._folder):
            self._board.close()


class PrometheusFile:
    """A file in Prometheus' text format with the newest values, replaced as a whole, as the textfile collector of its
    node exporter reads it."""

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._job = path, job
        self._values: dict[str, float] = {}
        self._next_s = 0.0

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= {"step": step, **values}
        if time.monotonic() >= self._next_s:
            self._write()

    def go_back(self, step: int) -> None:
        self._values["step"] = step

    def close(self) -> None:
        if self._values:
            self._write()

    def _write(self) -> None:
        self._next_s = time.monotonic() + _EVERY_S
        with telling_of_full_disk(self._path, say("name another file in run.prometheus")):
            write_anew(self._path, exposition(self._values, self._job))


def exposition(values: Mapping[str, float], job: str) -> str:
    """Values in Prometheus' text format, each with the job's name. A truth is 1 or 0: the format has numbers alone.

    prometheus.io/docs/instrumenting/exposition_formats
    """
    label = job.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = list[str]()
    for name, value in values.items():
        metric = _PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{label}"}} {value + 0!r}']
    return "".join(f"{line}\n" for line in lines)


class WandbCurves:
    """A run of Weights & Biases. Offline it is a folder below the run's, which `wandb sync` sends later."""

    def __init__(self, job: JobSpec, folder: Path) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="shardwright",
            name=job.name,
            dir=str(folder),
            mode=job.run.wandb,
            config=job.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="step")  # a step may come again after the run went back

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def go_back(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
