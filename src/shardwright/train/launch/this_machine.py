"""Chooses the kind of device for a job with run.device "auto" whose cluster names no device."""

from collections.abc import Callable

import torch

from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.train.launch.rank_life import device_kind


def on_this_machine(job: JobSpec, num_ranks: int, tell: Callable[[str], None]) -> JobSpec:
    """The job with its run.device set. "auto" becomes "cuda" if this machine has a CUDA device for each of its
    `num_ranks` ranks; if it has some but fewer, "cpu", with a note to `tell`. Without CUDA the job stays as it is.

    With "auto", memory and chunks of the loss would be computed for a CPU although the job runs on CUDA. A job whose
    cluster names a device is meant for that device, and stays as it is.
    """
    if not (job.run.device == "auto" and job.runs_on_cpu) or device_kind("auto") != "cuda":
        return job
    num_devices = torch.cuda.device_count()
    # A scheduler may let each rank see its own device alone; then num_ranks is the caller's one rank.
    kind = "cuda" if num_devices >= num_ranks else "cpu"
    if kind == "cpu":
        tell(
            f"note: {counted(num_ranks, 'rank')} on this machine's CPU, for it has "
            f"{counted(num_devices, 'CUDA device')}; a plan of fewer ranks (plan.dp, tp, pp and cp) runs there"
        )
    return job.model_copy(update={"run": job.run.model_copy(update={"device": kind})})
