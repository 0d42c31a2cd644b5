"""Words of Megatron-LM's command that a run needs beside its plan: the data, what is held out of them and when it is
evaluated, the seed, and checkpoints."""

import os
import shlex
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.run_places import (
    checkpoint_faults,
    checkpoint_place,
    is_address,
    steps_between_checkpoints,
)

_SUFFIXES = (".bin", ".idx")


def run_words(job: JobSpec, folder: Path, step_s: float) -> list[str]:
    """The lines of a job's data and checkpoints, whose paths are from a folder, and whose step takes `step_s`; 0 if
    that is unknown. PlanError with every fault."""
    faults = [fault for data in job.data.each for fault in _data_faults(data, folder)]
    faults += [
        say("{field} can't be said for {system}; leave it out", field=field, system="Megatron-LM")
        for field, is_set in (
            ("data.separate_documents", job.data.separate_documents),
            ("data.validation", bool(job.data.validation)),
            ("checkpoint.keep_best", bool(job.checkpoint.keep_best)),
        )
        if is_set
    ]
    faults += checkpoint_faults(job, "Megatron-LM", step_s)
    if faults:
        raise PlanError(say("job {name} for {system}", name=job.name, system="Megatron-LM"), faults)
    return [*_data_words(job, folder), *_evaluation_words(job), *_checkpoint_words(job, folder, step_s)]


def _data_faults(data: DataSpec, folder: Path) -> list[str]:
    """The fault of data that Megatron-LM does not read; none of data that may lie on the cluster alone."""
    if is_address(data.path):
        return [
            say(
                "Megatron-LM reads tokens of a folder, and {path} is an address; copy them into a folder that all "
                "nodes see, and set data.path to their PREFIX there",
                path=data.path,
            )
        ]
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
    held_out = 100 * job.data.validation_share
    split = f"--split {100 - held_out:g},{held_out:g},0"
    return [" ".join(["--data-path", *(shlex.quote(word) for word in words)]), split]


def _evaluation_words(job: JobSpec) -> list[str]:
    """The lines of the seed, of what is logged, and of evaluations; Megatron-LM makes one at the end, too."""
    batches = job.run.eval_batches if job.data.validation_share else 0
    return [
        f"--seed {job.run.seed}",
        f"--log-interval {job.run.log_every}",
        f"--eval-interval {job.run.eval_every or job.optimizer.steps}",
        f"--eval-iters {batches}",
    ]


def _checkpoint_words(job: JobSpec, folder: Path, step_s: float) -> list[str]:
    if not job.checkpoint.is_on:
        return []
    place = shlex.quote(checkpoint_place(job, folder, "megatron"))
    steps = steps_between_checkpoints(job, step_s)
    return [f"--save {place}", f"--load {place}", f"--save-interval {steps}"]
