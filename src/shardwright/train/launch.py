"""Start the local ranks through torch's elastic launcher, and say what went wrong if they fail."""

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwright.spec.base import PlanError
from shardwright.spec.job import JobSpec
from shardwright.spec.mesh import MeshShape
from shardwright.train.rank import Failure, Work, choose_device, failures_in, run_rank
from shardwright.train.seat import Seat
from shardwright.train.server import start_server

RANKS_PER_CORE = 16
RANK_MEMORY_MIB = 250
ENDING_S = 5.0


class RunError(RuntimeError):
    """Ranks failed. The message says which and why; `failure` is the cause's own note, if it left one."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


def launch(work: Work, job: JobSpec, folder: Path, num_threads: int = 0) -> list[Any]:
    """Run `work` on every rank of the job's plan, on this machine. Returns what each rank returned.

    Raises PlanError if check_machine does or the ranks refuse their input, RunError if a rank fails or this process
    is told to end.
    """
    check_machine(job, folder)
    shutil.rmtree(folder / "failures", ignore_errors=True)
    on_cpu = choose_device(job.run.device, 0).type == "cpu"
    if on_cpu:
        start_server()
    elastic = "torch.distributed.elastic"
    for noisy in (elastic, f"{elastic}.agent.server.api", "torch.multiprocessing"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    threading.Thread(target=_kill_the_stuck, args=(job.plan.world,), name="reaper", daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="shardwright-") as logs:  # torch would leave its own behind
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.plan.world,
            run_id=f"shardwright-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{job.run.port}",
            rdzv_configs={"timeout": 60},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver" if on_cpu else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            results = elastic_launch(config, _as_rank)(work, job, folder, num_threads)
        except ChildFailedError as error:
            raise _explain(error.failures, job, folder) from None
        except SignalException as error:
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RunError(f"{error.sigval.name} ended this process; the ranks were ended too") from None
    return [results[rank] for rank in sorted(results)]


def _kill_the_stuck(world: int) -> None:
    """After a rank failed, end those that do not end when asked: a stopped process never hears the question.

    torch would wait 30 s for them.
    """
    ranks: list[BaseProcess] = []
    while len(ranks) < world:
        time.sleep(0.2)
        ranks = list(multiprocessing.active_children())
    while any(rank.is_alive() for rank in ranks):
        time.sleep(0.2)
        if any(rank.exitcode for rank in ranks):
            time.sleep(ENDING_S)
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
            return


def _as_rank(work: Work, job: JobSpec, folder: Path, num_threads: int) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once and silently, also out of a collective
    seat = Seat.from_environment()
    assert seat is not None, "the launcher sets the environment of its ranks"
    return run_rank(seat, work, job, folder, partial(Failure.leave, folder=folder), num_threads)


def check_machine(job: JobSpec, folder: Path) -> None:
    """Make the run's folder. Raises PlanError with all that keeps this machine from running the job."""
    faults = machine_faults(job) + _folder_faults(folder)
    if faults:
        raise PlanError("this machine", faults)


def machine_faults(job: JobSpec) -> list[str]:
    """What this machine can't do for the job."""
    world, faults = job.plan.world, []
    if choose_device(job.run.device, 0).type == "cuda":
        if world > torch.cuda.device_count():
            faults.append(
                f"the plan needs {world} ranks and this machine has {torch.cuda.device_count()} CUDA devices; "
                f'use less dp, tp or pp, torchrun over several machines, or run.device = "cpu"'
            )
    else:
        cores = os.cpu_count() or 1
        by_memory = _available_mib() // RANK_MEMORY_MIB
        if world > min(cores * RANKS_PER_CORE, by_memory):
            faults.append(
                f"the plan needs {world} ranks, and this machine hosts at most "
                f"{min(cores * RANKS_PER_CORE, by_memory)}: {cores} cores x {RANKS_PER_CORE} = "
                f"{cores * RANKS_PER_CORE}, {_available_mib()} MiB free / {RANK_MEMORY_MIB} = {by_memory}; "
                f"use less dp, tp or pp, or torchrun over several machines"
            )
    if job.run.port and (refusal := _port_refusal(job.run.port)):
        faults.append(f"run.port {job.run.port} {refusal}; use another, or 0 for any free one")
    return faults


def _folder_faults(folder: Path) -> list[str]:
    """Make the folder and write to it: what else could tell that it can be done?"""
    way_out = "name another folder in run.folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in (folder, *folder.parents) if path.is_file()), folder)
        return [f"run.folder {folder} can't be made: {file} is a file; {way_out}"]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        return [f"run.folder {folder} can't be written to: {reason}; {way_out}"]
    return []


def _available_mib() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**30  # no such file on this system: do not limit
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable")), 2**30)


def _port_refusal(port: int) -> str:
    """Why the system does not give us this port; empty if it does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            return "is not for ordinary users, as all below 1024 are"
        except OSError:
            return "is taken by another program"
    return ""


def _explain(failures: dict[int, ProcessFailure], job: JobSpec, folder: Path) -> Exception:
    """One message from all that is known: signals first, then what the ranks noted themselves."""
    shape, world = MeshShape.of(job.plan), job.plan.world
    notes = failures_in(folder)
    inputs = [note for note in notes if note.kind == "input"]
    if inputs:
        return PlanError(inputs[0].subject, list(inputs[0].faults))
    killed = [(r, f) for r, f in failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM]
    if killed:
        rank, failure = killed[0]
        name = signal.Signals(-failure.exitcode).name
        return RunError(
            f"{shape.describe(rank)} was killed by {name}; the other {world - 1} ranks were ended"
            + (". The system ends processes so when memory runs out" if name == "SIGKILL" else "")
        )
    if notes:
        return RunError(notes[0].sentence(shape), notes[0])
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    return RunError(f"{shape.describe(rank)} ended with status {failure.exitcode} and left no note")
