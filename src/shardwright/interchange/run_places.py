"""Where and how often a job's run writes checkpoints with other software."""

import os
from pathlib import Path

from shardwright.config.job import JobSpec

_USUAL_S = 1800.0  # between checkpoints of a job that leaves it to the runtime


def is_address(path: str) -> bool:
    """True if a path is an address, such as s3://bucket/run."""
    return "://" in path


def checkpoint_place(job: JobSpec, folder: Path, name: str) -> str:
    """The absolute path of the folder of checkpoints of a job in a folder: the one that it says, or one with a name in
    the folder of its run."""
    place = job.checkpoint.path or os.path.join(job.run.folder or os.path.join("runs", job.name), name)
    return os.path.normpath(folder / os.path.expanduser(place))


def steps_between_checkpoints(job: JobSpec, step_s: float) -> int:
    """The steps from one checkpoint to the next, where a step takes some seconds."""
    return job.checkpoint.every_steps or max(1, round((job.checkpoint.every_s or _USUAL_S) / step_s))
