"""The devices of this machine that a job's ranks take, and the faults of a job that this machine can't run."""

import os
import socket
from collections.abc import Callable

import torch

from shardwright.config.base import PlanError
from shardwright.config.cluster_facts import device_entry
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.config.units import MIB, counted_phrase
from shardwright.train.launch.out_of_memory import available_bytes
from shardwright.train.launch.rank_environment import LOCALHOST
from shardwright.train.run_curves import curve_faults

RANKS_PER_CORE = 16


RANK_MEMORY_MIB = 250


def device_kind(run_device: str) -> str:
    """The kind of device for ranks on this machine, "cuda" or "cpu", from run.device. Raises PlanError if that is
    "cuda" and there is no CUDA device.

    Makes no context on a device, which would take half a gigabyte of its memory until the process ends.
    """
    if run_device == "cuda" and not torch.cuda.is_available():
        raise PlanError("run.device", [say("cuda is asked for and torch sees no CUDA device here; use auto or cpu")])
    return "cuda" if run_device != "cpu" and torch.cuda.is_available() else "cpu"


def choose_device(run_device: str, local_rank: int) -> torch.device:
    """The device of a local rank, which becomes the current one. Raises PlanError as `device_kind`.

    If a rank sees a single device, as under `srun --gpus-per-task=1`, it takes that one.
    """
    if device_kind(run_device) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    return device


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
            say(
                "note: {ranks} on this machine's CPU, for it has {devices}; a plan of fewer ranks (plan.dp, tp, pp "
                "and cp) runs there",
                ranks=counted_phrase(num_ranks, "rank"),
                devices=counted_phrase(num_devices, "CUDA device"),
            )
        )
    return job.model_copy(update={"run": job.run.model_copy(update={"device": kind})})


def cluster_faults(job: JobSpec) -> list[str]:
    """A fault if this machine lacks the devices of the job's cluster, else no fault.

    There is none if run.device is cpu. Not for ranks of torchrun or Slurm, whose launcher chose the machine.
    """
    cluster, world = job.cluster, job.plan.world
    names = dict.fromkeys(part.device for part in cluster.parts) or {cluster.device: None}
    accelerators = [name for name in names if name != "unknown" and device_entry(name).generation != "cpu"]
    num_here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not accelerators or job.run.device == "cpu" or num_here >= world:
        return []
    most_on_cpu = _most_on_cpu()[0]
    to_cpu = "--set run.device=cpu --set cluster.device=unknown"
    here = say("with fewer ranks (plan.dp, tp, pp and cp, and {options}) it runs on this CPU", options=to_cpu)
    if world <= most_on_cpu and not cluster.parts:
        here = say("{options} all of them on this CPU", options=to_cpu)
    return [
        say(
            "the job is for {ranks} on {devices}, and this machine has {present}, and hosts at most {most} on its CPU; "
            "`shardwright dryrun` runs any one of its ranks here, torchrun or Slurm all of them on its cluster, and "
            "{here}",
            ranks=counted_phrase(world, "rank"),
            devices=both(accelerators),
            present=counted_phrase(num_here, "CUDA device") if num_here else say("no CUDA device"),
            most=most_on_cpu,
            here=here,
        )
    ]


def machine_faults(job: JobSpec) -> list[str]:
    """Faults of the job on this machine: too many ranks, a port that is not free, or curves that can't be written."""
    world, faults = job.plan.world, curve_faults(job)
    if device_kind(job.run.device) == "cuda":
        if world > torch.cuda.device_count():
            faults.append(
                say(
                    "the plan needs {ranks} and this machine has {devices}; use less dp, tp or pp, torchrun over "
                    'several machines, or run.device = "cpu"',
                    ranks=counted_phrase(world, "rank"),
                    devices=counted_phrase(torch.cuda.device_count(), "CUDA device"),
                )
            )
    else:
        limit, arithmetic = _most_on_cpu()
        if world > limit:
            faults.append(
                say(
                    "the plan needs {world} ranks, and this machine hosts at most {limit}: {arithmetic}; use less "
                    "dp, tp or pp, or torchrun over several machines; `shardwright dryrun` runs any one of them here",
                    world=world,
                    limit=limit,
                    arithmetic=arithmetic,
                )
            )
    if job.run.port and (refusal := _port_refusal(job.run.port)):
        faults.append(
            say("run.port {port} {refusal}; use another, or 0 for any free one", port=job.run.port, refusal=refusal)
        )
    return faults


def _most_on_cpu() -> tuple[int, str]:
    """The most ranks that this machine hosts on its CPU, and the arithmetic in words."""
    cores = os.cpu_count() or 1
    free_mib = available_bytes() // MIB or 2**30  # no limit if the system does not tell the free memory
    by_memory = free_mib // RANK_MEMORY_MIB
    arithmetic = say(
        "{cores} cores x {per_core} = {by_cores}, {free_mib} MiB free / {rank_mib} = {by_memory}",
        cores=cores,
        per_core=RANKS_PER_CORE,
        by_cores=cores * RANKS_PER_CORE,
        free_mib=free_mib,
        rank_mib=RANK_MEMORY_MIB,
        by_memory=by_memory,
    )
    return min(cores * RANKS_PER_CORE, by_memory), arithmetic


def _port_refusal(port: int) -> str:
    """The reason why this port can't be used; "" if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except PermissionError:
            return say("is not for ordinary users, as all below 1024 are")
        except OSError:
            return say("is taken by another program")
    return ""
