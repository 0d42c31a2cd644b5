"""Words of Megatron-LM's command that a run needs beside its plan: the data, and checkpoints."""

import os
import shlex
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say

_SUFFIXES = (".bin", ".idx")
_USUAL_S = 1800.0  # between checkpoints of a job that leaves it to the runtime


def run_words(job: JobSpec, folder: Path, step_s: float) -> list[str]:
    """The lines of a job's data and checkpoints, whose paths are from a folder, and whose step takes `step_s`; 0 if
    that is unknown. PlanError with every fault."""
    faults = [fault for data in job.data.each for fault in _data_faults(data, folder)]
    if job.checkpoint.is_on and not job.checkpoint.every_steps and not step_s:
        faults.append(
            say("Megatron-LM saves by steps, and how long one takes is not known; set checkpoint.every_steps=500")
        )
    if faults:
        raise PlanError(say("job {name} for {system}", name=job.name, system="Megatron-LM"), faults)
    return [*_data_words(job, folder), *_checkpoint_words(job, folder, step_s)]


def _data_faults(data: DataSpec, folder: Path) -> list[str]:
    """The fault of data that Megatron-LM does not read; none of data that may lie on the cluster alone."""
    if data.format == "megatron":
        return []
    prefix = _prefix(data.path, folder)
    if data.format == "auto" and all(os.path.exists(prefix + suffix) for suffix in _SUFFIXES):
        return []
    return [
        say(
            "Megatron-LM reads tokens in PREFIX.bin and PREFIX.idx, and {path} is not known to be such a prefix; set "
            "data.path=PREFIX, and data.format=megatron where it lies on the cluster alone (its "
            "tools/preprocess_data makes it of text)",
            path=repr(data.path),
        )
    ]


def _prefix(path: str, folder: Path) -> str:
    """The prefix of a data set, as an absolute path."""
    stem = path.removesuffix(".bin").removesuffix(".idx")
    return os.path.normpath(folder / os.path.expanduser(stem))


def _data_words(job: JobSpec, folder: Path) -> list[str]:
    prefixes = [_prefix(data.path, folder) for data in job.data.each]
    weights = [f"{source.weight:g}" for source in job.data.sources]
    words = [word for pair in zip(weights, prefixes, strict=True) for word in pair] if weights else prefixes
    return [" ".join(["--data-path", *(shlex.quote(word) for word in words)]), "--split 99,1,0"]


def _checkpoint_words(job: JobSpec, folder: Path, step_s: float) -> list[str]:
    if not job.checkpoint.is_on:
        return []
    place = job.checkpoint.path or os.path.join(job.run.folder or os.path.join("runs", job.name), "megatron")
    place = shlex.quote(os.path.normpath(folder / os.path.expanduser(place)))
    steps = job.checkpoint.every_steps or max(1, round((job.checkpoint.every_s or _USUAL_S) / step_s))
    return [f"--save {place}", f"--load {place}", f"--save-interval {steps}"]
