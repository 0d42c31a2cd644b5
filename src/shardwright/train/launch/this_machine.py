"""The kind of device that a job with run.device "auto" takes on this machine, where its cluster names none."""

from collections.abc import Callable

import torch

from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.train.launch.rank_life import device_kind


def on_this_machine(job: JobSpec, num_ranks: int, tell: Callable[[str], None]) -> JobSpec:
    """The job with run.device "cuda" where "auto" finds a CUDA device here for each of its `num_ranks` ranks of this
    machine, and with "cpu" where there are fewer, which it tells.

    Else memory and chunks of the loss would be counted by the rules of processors while the job runs on CUDA. A job
    whose cluster names a device is meant for that one, and stays as it is.
    """
    if not (job.run.device == "auto" and job.runs_on_cpu) or device_kind("auto") != "cuda":
        return job
    num_devices = torch.cuda.device_count()
    # A scheduler may give each rank one device alone to see: then it has as many as it has ranks.
    kind = "cuda" if num_devices >= num_ranks else "cpu"
    if kind == "cpu":
        tell(
            f"note: {counted(num_ranks, 'rank')} on this machine's CPU, for it has "
            f"{counted(num_devices, 'CUDA device')}; a plan of fewer ranks (plan.dp, tp, pp and cp) runs there"
        )
    return job.model_copy(update={"run": job.run.model_copy(update={"device": kind})})
