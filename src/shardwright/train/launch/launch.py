"""Start the local ranks, wait for them, and say what went wrong if they fail.

Ranks of several machines are started by torchrun, or by whatever else sets its variables
(train/launch/rank_environment.py).
"""

import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.config.base import PlanError, RunError
from shardwright.config.job import JobSpec
from shardwright.config.units import MIB, counted
from shardwright.config.usual_links import device_entry
from shardwright.sharding.mesh import MeshShape
from shardwright.train.launch.ending import signal_name
from shardwright.train.launch.fork_server import ServerEndedError
from shardwright.train.launch.forking import Run
from shardwright.train.launch.out_of_memory import available_bytes
from shardwright.train.launch.preemption import Preemption, heeded
from shardwright.train.launch.rank_environment import LOCALHOST, RankEnvironment, allowed_threads
from shardwright.train.launch.rank_life import Failure, Work, by_cause, device_kind, run_rank
from shardwright.train.launch.rank_processes import ForkedRanks, RankProcesses, SpawnedRanks
from shardwright.train.launch.run_folder import folder_faults

RANKS_PER_CORE = 16
RANK_MEMORY_MIB = 250
# After the first failure others may still tell its cause. A rank that lost its connection waits for a moment itself.
SETTLING_S = 1.0
SETTLING_AFTER_LOSS_S = 5.0


class RankFailedError(RunError):
    """A rank failed. The message says which and why; `failure` is the cause's own note, if it left one."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


def launch(work: Work, job: JobSpec, folder: Path, num_threads: int = 0) -> list[Any]:
    """Run `work` on every rank of the job's plan, on this machine. Returns what each rank returned.

    Raises PlanError if check_machine does or the ranks refuse their input, RunError if a rank fails. No rank outlives
    the call, nor this process.
    """
    check_machine(job, folder)
    return run_once(work, job, folder, num_threads, None)


def run_once(work: Work, job: JobSpec, folder: Path, num_threads: int, preemption: Preemption | None) -> list[Any]:
    """Run `work` on every rank on a machine that was checked; the ranks heed requests where there is a `preemption`."""
    world = job.plan.world
    heeds = preemption is not None
    num_threads = num_threads or allowed_threads()
    with _rendezvous(job.run.port) as port:
        seats = [RankEnvironment(rank, rank, world, world, store_port=port) for rank in range(world)]
        runs = [partial(_live_and_heed if heeds else _live, seat, work, job, folder, num_threads) for seat in seats]
        try:
            end = run_ranks(runs, device_kind(job.run.device) == "cpu", preemption, job.run.timeout_s)
        except ServerEndedError as error:
            raise RankFailedError(f"{error}{_others_ended(world)}") from None
    if len(end.results) < world:
        raise _explain(end, job) from None
    return [end.results[rank] for rank in range(world)]


def _live(
    seat: RankEnvironment, work: Work, job: JobSpec, folder: Path, num_threads: int, connection: "Connection[Any, Any]"
) -> None:
    """A rank's life, in its process. It sends its result, or why there is none."""
    # Its sockets too are for this machine alone: for its interface to itself.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    if device_kind(job.run.device) == "cpu":
        # torch's record of the last 2,000 collectives, which nobody reads: 3 MiB, and time in each of them.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    connection.send(_Result(run_rank(seat, work, job, folder, connection.send, num_threads)))


def _live_and_heed(
    seat: RankEnvironment, work: Work, job: JobSpec, folder: Path, num_threads: int, connection: "Connection[Any, Any]"
) -> None:
    """The life of a rank that can be asked to save and leave."""
    with heeded(at_first_look=partial(connection.send, _CanSave())):
        _live(seat, work, job, folder, num_threads, connection)


@contextmanager
def _rendezvous(port: int) -> Iterator[int]:
    """A store in which the ranks of this machine meet, and which no other machine reaches. Yields its port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOCALHOST, port))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        try:
            yield port
        finally:
            del store


@dataclass(frozen=True)
class _Result:
    value: Any


@dataclass(frozen=True)
class _CanSave:
    """A rank has done a step, and looks at requests from here on."""


@dataclass
class _End:
    """How ranks ended: results, the notes of those that failed, and the statuses of those that ended without. `asked`
    names the signal where they were asked to save and leave, and `late` are those that had not in time."""

    results: dict[int, Any] = field(default_factory=dict)
    notes: list[Failure] = field(default_factory=list)
    statuses: dict[int, int | None] = field(default_factory=dict)
    asked: str = ""
    late: list[int] = field(default_factory=list)


def run_ranks(runs: Sequence[Run], on_cpu: bool, preemption: Preemption | None = None, timeout_s: float = 0.0) -> _End:
    """Run one rank for each of `runs`, to the end of all or until one fails; or to `timeout_s` after a request to
    leave. Raises ServerEndedError."""
    # The server does not have the launching script itself, whose functions go by its name.
    can_fork = on_cpu and b"__main__" not in pickle.dumps(runs)
    ranks: RankProcesses = ForkedRanks(preemption is not None) if can_fork else SpawnedRanks()
    try:
        ranks.start(runs)
        return _wait(ranks, preemption, timeout_s)
    finally:
        if preemption is not None:
            preemption.can_save = False
        ranks.end()


def _wait(ranks: RankProcesses, preemption: Preemption | None, timeout_s: float) -> _End:
    end = _End()
    speaking = {connection: rank for rank, connection in enumerate(ranks.connections)}
    world, can_save = len(speaking), set[int]()
    failed_s = asked_s = 0.0
    while speaking:
        is_cause_known = end.statuses or {note.kind for note in end.notes} != {"lost"}
        settling_s = SETTLING_S if is_cause_known else SETTLING_AFTER_LOSS_S
        ends_s = [failed_s + settling_s] * bool(failed_s) + [asked_s + timeout_s] * bool(asked_s)
        left_s = min(ends_s) - time.monotonic() if ends_s else None
        if left_s is not None and left_s <= 0:
            end.late = [rank for rank in speaking.values() if not failed_s and rank not in end.results]
            break
        requests = [preemption.fileno()] if preemption is not None and not asked_s else []
        ready = wait([*speaking, *requests], left_s)
        if preemption is not None and preemption.fileno() in ready:
            asked_s, end.asked = time.monotonic(), signal_name(preemption.signal or 0)
            ranks.send(signal.SIGUSR1)
        for connection, rank in [item for item in speaking.items() if item[0] in ready]:
            try:
                said = connection.recv()
            except (EOFError, OSError):
                del speaking[connection]
                if rank not in end.results and all(note.rank != rank for note in end.notes):
                    end.statuses[rank] = ranks.status(rank)
            else:
                if isinstance(said, Failure):
                    end.notes.append(said)
                elif isinstance(said, _Result):
                    end.results[rank] = said.value
                elif isinstance(said, _CanSave):
                    can_save.add(rank)
        if preemption is not None:
            preemption.can_save = len(can_save) == world
        if not failed_s and (end.notes or end.statuses):
            failed_s = time.monotonic()
    return end


def check_machine(job: JobSpec, folder: Path) -> None:
    """Make the run's folder. Raises PlanError with all that keeps this machine from running the job."""
    if faults := machine_faults(job) + folder_faults(folder):
        raise PlanError("this machine", faults)


def cluster_faults(job: JobSpec) -> list[str]:
    """Faults of this machine beside the devices that the job names: one sentence, or nothing.

    Not for a rank of torchrun or Slurm, which is where its launcher put it; nor where run.device is cpu.
    """
    cluster, world = job.cluster, job.plan.world
    names = dict.fromkeys(part.device for part in cluster.parts) or {cluster.device: None}
    wanted = [name for name in names if name != "unknown" and device_entry(name).generation != "cpu"]
    num_here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not wanted or job.run.device == "cpu" or num_here >= world:
        return []
    most = _most_on_cpu()[0]
    to_cpu = "--set run.device=cpu --set cluster.device=unknown"
    fewer = f" with fewer ranks (plan.dp, tp, pp and cp, and {to_cpu}) it runs on this CPU"
    return [
        f"the job is for {counted(world, 'rank')} on {' and '.join(wanted)}, and this machine has "
        f"{counted(num_here, 'CUDA device') if num_here else 'no CUDA device'}, and hosts at most {most} on its CPU; "
        f"`shardwright dryrun` runs any one of its ranks here, torchrun or Slurm all of them on its cluster, and"
        + (f" {to_cpu} all of them on this CPU" if world <= most and not cluster.parts else fewer)
    ]


def _most_on_cpu() -> tuple[int, str]:
    """Ranks that this machine hosts on its CPU, and their arithmetic."""
    cores = os.cpu_count() or 1
    free_mib = available_bytes() // MIB or 2**30  # a system that does not say it sets no limit
    by_memory = free_mib // RANK_MEMORY_MIB
    arithmetic = (
        f"{cores} cores x {RANKS_PER_CORE} = {cores * RANKS_PER_CORE}, {free_mib} MiB free / {RANK_MEMORY_MIB} = "
        f"{by_memory}"
    )
    return min(cores * RANKS_PER_CORE, by_memory), arithmetic


def machine_faults(job: JobSpec) -> list[str]:
    """Requests of the job that this machine can't meet."""
    world, faults = job.plan.world, []
    if device_kind(job.run.device) == "cuda":
        if world > torch.cuda.device_count():
            faults.append(
                f"the plan needs {counted(world, 'rank')} and this machine has "
                f"{counted(torch.cuda.device_count(), 'CUDA device')}; "
                f'use less dp, tp or pp, torchrun over several machines, or run.device = "cpu"'
            )
    else:
        most, arithmetic = _most_on_cpu()
        if world > most:
            faults.append(
                f"the plan needs {world} ranks, and this machine hosts at most {most}: {arithmetic}; use less dp, tp "
                f"or pp, or torchrun over several machines; `shardwright dryrun` runs any one of them here"
            )
    if job.run.port and (refusal := _port_refusal(job.run.port)):
        faults.append(f"run.port {job.run.port} {refusal}; use another, or 0 for any free one")
    return faults


def _port_refusal(port: int) -> str:
    """Why the system does not give us this port; empty if it does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except PermissionError:
            return "is not for ordinary users, as all below 1024 are"
        except OSError:
            return "is taken by another program"
    return ""


def _explain(end: _End, job: JobSpec) -> Exception:
    """One message from all that is known: what killed a rank first, then what the ranks told themselves."""
    shape = MeshShape.of(job.plan)
    notes = by_cause(end.notes)
    if notes and notes[0].kind == "input":
        return PlanError(notes[0].subject, list(notes[0].faults))
    killed = [(rank, -status) for rank, status in end.statuses.items() if status is not None and status < 0]
    if killed:
        rank, number = killed[0]
        name = signal_name(number)
        return RankFailedError(
            f"{shape.describe(rank)} was killed by {name}{_others_ended(job.plan.world - 1)}"
            + (". The system ends processes so when memory runs out" if name == "SIGKILL" else "")
        )
    if notes:
        return RankFailedError(notes[0].sentence(shape), notes[0])
    if end.late:
        return RankFailedError(
            f"{shape.describe(end.late[0])} had not saved and left {job.run.timeout_s:g} s after {end.asked}; what was "
            "saved before stays; if a step and its checkpoint take longer, raise run.timeout_s"
        )
    rank, status = next(iter(end.statuses.items()))
    how = "in a way that nobody could tell" if status is None else f"with status {status}"
    return RankFailedError(f"{shape.describe(rank)} ended {how} and left no note{_others_ended(job.plan.world - 1)}")


def _others_ended(number: int) -> str:
    if number == 0:
        return ""
    return "; the other rank was ended" if number == 1 else f"; the other {number} ranks were ended"
