"""The places and the interval of a run's checkpoints with other software."""

import os
from pathlib import Path

from shardwright.config.checkpoint import USUAL_EVERY_S
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say


def is_address(path: str) -> bool:
    """True if a path is an address, such as s3://bucket/run."""
    return "://" in path


def checkpoint_faults(job: JobSpec, system: str, step_s: float) -> list[str]:
    """The faults of checkpoints that a system is to write into a folder every so many steps, where a step takes
    `step_s`; 0 if that is unknown. `system` is its title."""
    faults = list[str]()
    if job.checkpoint.is_on and is_address(job.checkpoint.path):
        faults.append(
            say(
                "{system} writes checkpoints into a folder, and checkpoint.path is {address}; name a folder that all "
                "nodes see",
                system=system,
                address=job.checkpoint.path,
            )
        )
    if job.checkpoint.is_on and not job.checkpoint.every_steps and not step_s:
        faults.append(
            say(
                "{system} saves by steps, and how long one takes is not known; set checkpoint.every_steps=500",
                system=system,
            )
        )
    return faults


def checkpoint_place(job: JobSpec, folder: Path, name: str) -> str:
    """The absolute path of the folder of checkpoints of a job in a folder: the one that it says, or one with a name in
    the folder of its run."""
    place = job.checkpoint.path or os.path.join(job.run.folder or os.path.join("runs", job.name), name)
    return os.path.normpath(folder / os.path.expanduser(place))


def steps_between_checkpoints(job: JobSpec, step_s: float) -> int:
    """The steps from one checkpoint to the next, where a step takes some seconds."""
    return job.checkpoint.every_steps or max(1, round((job.checkpoint.every_s or USUAL_EVERY_S) / step_s))
