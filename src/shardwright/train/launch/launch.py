"""Starts the local ranks, waits for them, and explains a failure.

Ranks on several machines are started by torchrun, or by another launcher that sets its variables
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

import torch.distributed as dist

from shardwright.config.base import PlanError, RunError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.sharding.mesh import MeshShape
from shardwright.train.launch.ending import signal_name
from shardwright.train.launch.fork_server import ServerEndedError
from shardwright.train.launch.forking import Run
from shardwright.train.launch.preemption import Preemption, heeded
from shardwright.train.launch.rank_environment import LOCALHOST, RankEnvironment, allowed_threads
from shardwright.train.launch.rank_life import Failure, Work, by_cause, run_rank
from shardwright.train.launch.rank_processes import ForkedRanks, RankProcesses, SpawnedRanks
from shardwright.train.launch.run_folder import make_folder
from shardwright.train.launch.this_machine import device_kind, machine_faults

# Time after the first failure in which other ranks may still tell its cause. After a lost connection it is longer,
# because a rank that lost its connection waits itself for a moment.
SETTLING_S = 1.0
SETTLING_AFTER_LOSS_S = 5.0


class RankFailedError(RunError):
    """A rank failed. The message tells which and why; `failure` is that rank's note, if it sent one."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


def launch(work: Work, job: JobSpec, folder: Path, num_threads: int = 0) -> list[Any]:
    """Run `work` on every rank of the job's plan, on this machine. Returns the result of each rank.

    Raises PlanError if check_machine does or the ranks refuse their input, RunError if a rank fails. All ranks end with
    the call, or with this process if that ends first.
    """
    check_machine(job, folder)
    return run_once(work, job, folder, num_threads, None)


def run_once(work: Work, job: JobSpec, folder: Path, num_threads: int, preemption: Preemption | None) -> list[Any]:
    """Run `work` on every rank, after check_machine. With `preemption`, ranks can be requested to save and leave."""
    world = job.plan.world
    life = _live if preemption is None else _live_and_heed
    num_threads = num_threads or allowed_threads()
    with _rendezvous(job.run.port) as port:
        envs = [RankEnvironment(rank, rank, world, world, store_port=port) for rank in range(world)]
        runs = [partial(life, env, work, job, folder, num_threads) for env in envs]
        try:
            end = run_ranks(runs, device_kind(job.run.device) == "cpu", preemption, job.run.timeout_s)
        except ServerEndedError as error:
            raise RankFailedError(_others_ended(error_text(error), world)) from None
    if len(end.results) < world:
        raise _explain(end, job) from None
    return [end.results[rank] for rank in range(world)]


def _live(
    env: RankEnvironment, work: Work, job: JobSpec, folder: Path, num_threads: int, connection: "Connection[Any, Any]"
) -> None:
    """Run one rank in its own process, and send its result, or the failure."""
    # Sockets of this rank are for this machine alone, so they use the loopback interface.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    if device_kind(job.run.device) == "cpu":
        # Turn off torch's record of the last 2,000 collectives, which is not used, and takes 3 MiB and time.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    connection.send(_Result(run_rank(env, work, job, folder, connection.send, num_threads)))


def _live_and_heed(
    env: RankEnvironment, work: Work, job: JobSpec, folder: Path, num_threads: int, connection: "Connection[Any, Any]"
) -> None:
    """Run one rank that can be requested to save and leave."""
    with heeded(at_first_step=partial(connection.send, _CanSave())):
        _live(env, work, job, folder, num_threads, connection)


@contextmanager
def _rendezvous(port: int) -> Iterator[int]:
    """Host the rendezvous store of local ranks, which no other machine can reach. Yields its port."""
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
    """The message of a rank in its first step, which checks for requests from then on."""


@dataclass
class _End:
    """The end of all ranks: results, notes of failed ranks, and statuses of ranks that ended without either. `request`
    is the name of the signal that requested them to save and leave, and `late` are ranks that did not in time."""

    results: dict[int, Any] = field(default_factory=dict)
    notes: list[Failure] = field(default_factory=list)
    statuses: dict[int, int | None] = field(default_factory=dict)
    request: str = ""
    late: list[int] = field(default_factory=list)

    def take(self, rank: int, message: Any) -> None:
        """Keep a rank's result, or the note of its failure."""
        if isinstance(message, Failure):
            self.notes.append(message)
        elif isinstance(message, _Result):
            self.results[rank] = message.value

    def has_word_of(self, rank: int) -> bool:
        """True if a rank has sent its result, or a note."""
        return rank in self.results or any(note.rank == rank for note in self.notes)

    def settling_s(self) -> float:
        """The time after the first failure in which other ranks may tell its cause."""
        is_cause_known = self.statuses or {note.kind for note in self.notes} != {"lost"}
        return SETTLING_S if is_cause_known else SETTLING_AFTER_LOSS_S


def run_ranks(runs: Sequence[Run], on_cpu: bool, preemption: Preemption | None = None, timeout_s: float = 0.0) -> _End:
    """Run one rank for each of `runs`, until all end or one fails, or until `timeout_s` after a request to leave.
    Raises ServerEndedError."""
    # The server has not imported the launching script, so it can't unpickle functions of `__main__`.
    can_fork = on_cpu and b"__main__" not in pickle.dumps(runs)
    ranks: RankProcesses = ForkedRanks(preemption is not None) if can_fork else SpawnedRanks()
    try:
        ranks.start(runs)
        return _wait(ranks, preemption, timeout_s)
    finally:
        if preemption is not None:
            preemption.is_watched = preemption.can_save = False
        ranks.end()


def _wait(ranks: RankProcesses, preemption: Preemption | None, timeout_s: float) -> _End:
    """Wait until all ranks have ended, until others had time to tell the cause of a failure, or until `timeout_s` after
    a request to leave, which is passed on to the ranks."""
    end = _End()
    open_connections = {connection: rank for rank, connection in enumerate(ranks.connections)}
    world, can_save = len(open_connections), set[int]()
    failed_s = requested_s = 0.0
    if preemption is not None:
        preemption.is_watched = True
    while open_connections:
        ends_s = [failed_s + end.settling_s()] * bool(failed_s) + [requested_s + timeout_s] * bool(requested_s)
        remaining_s = min(ends_s) - time.monotonic() if ends_s else None
        if remaining_s is not None and remaining_s <= 0:
            end.late = [rank for rank in open_connections.values() if not failed_s and rank not in end.results]
            break
        requests = [preemption.fileno()] if preemption is not None and not requested_s else []
        ready = wait([*open_connections, *requests], remaining_s)
        for connection, rank in [item for item in open_connections.items() if item[0] in ready]:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                del open_connections[connection]
                if not end.has_word_of(rank):
                    end.statuses[rank] = ranks.status(rank)
            else:
                end.take(rank, message)
                if isinstance(message, _CanSave):
                    can_save.add(rank)
        if preemption is not None:
            preemption.can_save = len(can_save) == world
            if preemption.fileno() in ready:
                preemption.answer()
                requested_s, end.request = time.monotonic(), signal_name(preemption.signal or 0)
                ranks.send(signal.SIGUSR1)
        if not failed_s and (end.notes or end.statuses):
            failed_s = time.monotonic()
    return end


def check_machine(job: JobSpec, folder: Path) -> None:
    """Make the run's folder. Raises PlanError with every fault that keeps this machine from running the job."""
    if faults := machine_faults(job) + make_folder(folder):
        raise PlanError("this machine", faults)


def _explain(end: _End, job: JobSpec) -> Exception:
    """The exception for a failed launch: from a rank's fault in its input, else from a signal that killed a rank, else
    from the notes of ranks, else from ranks that were late or left no note."""
    shape = MeshShape.of(job.plan)
    notes = by_cause(end.notes)
    if notes and notes[0].kind == "input":
        return PlanError(notes[0].subject, list(notes[0].faults))
    killed = [(rank, -status) for rank, status in end.statuses.items() if status is not None and status < 0]
    if killed:
        rank, number = killed[0]
        name = signal_name(number)
        fault = say("{rank} was killed by {signal}", rank=shape.describe(rank), signal=name)
        message = _others_ended(fault, job.plan.world - 1)
        if name == "SIGKILL":
            message = say("{fault}. The system ends processes so when memory runs out", fault=message)
        return RankFailedError(message)
    if notes:
        return RankFailedError(notes[0].sentence(shape), notes[0])
    if end.late:
        return RankFailedError(
            say(
                "{rank} had not saved and left {timeout_s:g} s after {request}; what was saved before stays; if a "
                "step and its checkpoint take longer, raise run.timeout_s",
                rank=shape.describe(end.late[0]),
                timeout_s=job.run.timeout_s,
                request=end.request,
            )
        )
    rank, status = next(iter(end.statuses.items()))
    fault = say("{rank} ended in a way that nobody could tell and left no note", rank=shape.describe(rank))
    if status is not None:
        fault = say("{rank} ended with status {status} and left no note", rank=shape.describe(rank), status=status)
    return RankFailedError(_others_ended(fault, job.plan.world - 1))


def _others_ended(fault: str, number: int) -> str:
    """The fault of a rank, and that other ranks were ended for it."""
    if number == 0:
        return fault
    if number == 1:
        return say("{fault}; the other rank was ended", fault=fault)
    return say("{fault}; the other {number} ranks were ended", fault=fault, number=number)
