"""The life of one rank: device, process group, mesh, the work, and an end that says why.

A rank that fails tells whoever started it why, on a way that needs no disk. Of the notes of several ranks the user is
told the one that failed first in cause and not in time.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.config.base import PassingError, PlanError, RunError
from shardwright.config.job import JobSpec
from shardwright.config.standard_streams import let_readers_leave
from shardwright.config.units import counted
from shardwright.parallel.comm.hang_watch import Watch, is_lost_connection
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import job_mesh
from shardwright.train.launch.device_environment import set_device_environment
from shardwright.train.launch.ending import flush_standard_streams
from shardwright.train.launch.full_disk import DiskFullError
from shardwright.train.launch.loading import collect_as_usual
from shardwright.train.launch.meeting import NotMetError, attempt_name
from shardwright.train.launch.out_of_memory import OutOfMemoryError, is_out_of_memory, room_bytes
from shardwright.train.launch.preemption import is_asked
from shardwright.train.launch.rank_environment import RankEnvironment

Work = Callable[[JobSpec, Mesh, Path], Any]

# Time for the store to answer the watch.
STORE_S = 10.0


# From cause to consequence. What is wrong with the input, or with the run, every rank finds alike.
KINDS = ("input", "memory", "disk", "run", "error", "timeout", "lost")
OF_ALL_RANKS = ("input", "run")


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: one of KINDS, and what there is to say."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    subject: str = ""  # of wrong input: what is wrong, and all its faults
    faults: tuple[str, ...] = ()
    room_bytes: int = 0  # where memory ran out: what there was for this rank when it began

    def sentence(self, shape: MeshShape) -> str:
        """The failure as the user reads it."""
        if self.kind == "timeout" or self.kind in OF_ALL_RANKS:
            return self.message
        return f"{shape.describe(self.rank)} failed: {self.message}" + (f"\n{self.traceback}" if self.traceback else "")


def by_cause(notes: Iterable[Failure]) -> list[Failure]:
    """The notes of ranks, causes first."""
    return sorted(notes, key=lambda note: (KINDS.index(note.kind), note.rank))


def run_rank(
    seat: RankEnvironment, work: Work, job: JobSpec, folder: Path, tell: Callable[[Failure], None], num_threads: int = 0
) -> Any:
    """Join the other ranks, do the work, leave. If that fails, `tell` and end the process with status 1 or 2."""
    shape = MeshShape.of(job.plan)
    watch: Watch | None = None
    room = 0
    collect_as_usual()
    let_readers_leave()
    try:
        torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // seat.local_world))
        if device_kind(job.run.device) == "cuda":
            set_device_environment(seat.local_world)
        device = choose_device(job.run.device, seat.local_rank)
        _check_world(seat, job)
        room = room_bytes(device, seat.local_world)
        if seat.world > 1:
            mesh, watch = join_others(
                seat, device, job.run.timeout_s, shape.describe, lambda watch: job_mesh(job, seat.rank, device, watch),
                on_timeout=lambda message: give_up(Failure(seat.rank, "timeout", message), tell),
            )  # fmt: skip
        else:
            mesh = job_mesh(job, seat.rank, device, None)
        result = work(job, mesh, folder)
        if watch is not None:
            watch.stop()
            dist.destroy_process_group()
        return result
    except PlanError as error:
        tell(Failure(seat.rank, "input", str(error), subject=error.subject, faults=tuple(error.faults)))
        raise SystemExit(2) from None
    except Exception as error:
        failure = Failure(seat.rank, "error", f"{type(error).__name__}: {error}", traceback.format_exc())
        if isinstance(error, NotMetError):
            failure = Failure(seat.rank, "timeout", str(error))
        elif isinstance(error, RunError):
            other = "error" if isinstance(error, PassingError) else "run"
            failure = Failure(seat.rank, "disk" if isinstance(error, DiskFullError) else other, str(error))
        elif isinstance(error, FloatingPointError):  # it would come again, from the same data
            failure = Failure(seat.rank, "run", str(error))
        elif is_out_of_memory(error):
            known = error if isinstance(error, OutOfMemoryError) else OutOfMemoryError(error, None)
            failure = Failure(seat.rank, "memory", str(known), room_bytes=room)
        elif watch is not None and is_lost_connection(error):
            # Another rank is gone. Whoever started us ends us in a moment, unless that rank was on another machine.
            if not is_asked():  # else whoever asked this rank to leave ends it, too
                time.sleep(4.0)
            reason = str(error).partition("\n")[0]
            failure = Failure(seat.rank, "lost", f"lost its connection ({reason}); {watch.silent_ranks(seat.world)}")
        give_up(failure, tell)


def join_others(
    seat: RankEnvironment, device: torch.device, timeout_s: float, describe: Callable[[int], str],
    make: Callable[[Watch], Mesh], on_timeout: Callable[[str], None], explains_losses: bool = False,
) -> tuple[Mesh, Watch]:  # fmt: skip
    """Enter the process group of all ranks and `make` the mesh, watched from the first moment. Raises NotMetError."""
    attempt = ""
    if not seat.store_is_up:
        _join(seat, timeout_s, device, attempt)
    elif seat.store_is_used:
        used = _store(seat, timeout_s, attempt)
        attempt = attempt_name(used, seat.rank, seat.world, timeout_s, describe)
    watch = Watch(_store(seat, STORE_S, attempt), seat.rank, timeout_s, describe, on_timeout, explains_losses)
    watch.start()
    with watch.waiting("joining the others", tuple(rank for rank in range(seat.world) if rank != seat.rank)):
        if seat.store_is_up:
            _join(seat, timeout_s, device, attempt)
        return make(watch), watch


def give_up(failure: Failure, tell: Callable[[Failure], None]) -> None:
    """End the process at once: other threads may be stuck in a collective that will never return."""
    tell(failure)
    flush_standard_streams()
    os._exit(1)


def device_kind(wanted: str) -> str:
    """The kind of device that ranks run on here, "cuda" or "cpu". PlanError where CUDA is asked for and there is none.

    It makes no context on a device: one takes half a gigabyte of it, for as long as the process lives.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PlanError("run.device", ["cuda is asked for and torch sees no CUDA device here; use auto or cpu"])
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a local rank, which is the current one from here on. PlanError as `device_kind`.

    Where each rank sees one device alone, as under `srun --gpus-per-task=1`, that one is its own.
    """
    if device_kind(wanted) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _check_world(seat: RankEnvironment, job: JobSpec) -> None:
    """PlanError if there are not as many ranks as the plan needs."""
    plan = job.plan
    if seat.world != plan.world:
        were_started = f"{counted(seat.world, 'rank')} {'was' if seat.world == 1 else 'were'} started"
        needed = f"the plan needs {plan.degrees} = {plan.world}; start {plan.world}, or change the plan"
        raise PlanError("launch", [f"{were_started}, and {needed}"])


def _join(seat: RankEnvironment, timeout_s: float, device: torch.device, attempt: str) -> None:
    """Enter the process group of all ranks. Where their store is not up yet, the first of them hosts it."""
    bound_s = 2 * timeout_s + 10  # the watch speaks first
    store = _store(seat, bound_s, attempt) if seat.store_is_up else None
    where: dict[str, Any] = {"store": store, "rank": seat.rank, "world_size": seat.world} if store else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=bound_s), **where)


def _store(seat: RankEnvironment, timeout_s: float, attempt: str) -> dist.Store:
    """A connection of its own to the rendezvous store: the watch must be able to speak while the main thread waits."""
    store = dist.TCPStore(seat.store_host, seat.store_port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"shardwright/{attempt}", store)
