"""The life of one rank: device, process group, mesh, the work, and an end with a reason.

A rank that fails sends its launcher a note, without using the disk. If several ranks fail, the user is told the note
that is nearest to the cause, not the first in time.
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

from shardwright.config.base import PassingError, PlanError, RunError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say
from shardwright.config.standard_streams import let_readers_leave
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.hang_watch import Watch, WatchRules
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.comm.transport import is_lost_connection
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import job_mesh
from shardwright.train.launch.ending import flush_standard_streams
from shardwright.train.launch.full_disk import DiskFullError
from shardwright.train.launch.loading import collect_as_usual
from shardwright.train.launch.meeting import NotMetError, attempt_name
from shardwright.train.launch.out_of_memory import OutOfMemoryError, is_out_of_memory, room_bytes
from shardwright.train.launch.preemption import is_asked
from shardwright.train.launch.rank_environment import RankEnvironment, set_device_environment
from shardwright.train.launch.this_machine import choose_device, device_kind

Work = Callable[[JobSpec, Mesh, Path], Any]

# Time for the store to answer the watch.
STORE_S = 10.0


# Kinds of failures, from causes to consequences. Every rank finds the faults of OF_ALL_RANKS.
KINDS = ("input", "memory", "disk", "run", "error", "timeout", "lost")
OF_ALL_RANKS = ("input", "run")


@dataclass(frozen=True)
class Failure:
    """The note of a failed rank: its kind, one of KINDS, and a message."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    subject: str = ""  # of kind "input": the subject and faults of the PlanError
    faults: tuple[str, ...] = ()
    room_bytes: int = 0  # of kind "memory": the free memory for this rank when it began

    def sentence(self, shape: MeshShape) -> str:
        """The failure in words for the user."""
        if self.kind == "timeout" or self.kind in OF_ALL_RANKS:
            return self.message
        fault = say("{rank} failed: {reason}", rank=shape.describe(self.rank), reason=self.message)
        return say("{fault}\n{traceback}", fault=fault, traceback=self.traceback) if self.traceback else fault


def by_cause(notes: Iterable[Failure]) -> list[Failure]:
    """The notes of ranks, causes first."""
    return sorted(notes, key=lambda note: (KINDS.index(note.kind), note.rank))


def run_rank(
    env: RankEnvironment, work: Work, job: JobSpec, folder: Path, tell: Callable[[Failure], None], num_threads: int = 0
) -> Any:
    """Join the other ranks, do the work, and leave. Returns the result of `work`. If a step fails, `tell` gets the
    failure, and the process ends with status 1 or 2."""
    watch: Watch | None = None
    room = 0
    collect_as_usual()
    let_readers_leave()
    try:
        torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // env.local_world))
        if device_kind(job.run.device) == "cuda":
            set_device_environment(env.local_world)
        device = choose_device(job.run.device, env.local_rank)
        _check_world(env, job)
        room = room_bytes(device, env.local_world)
        if env.world > 1:
            rules = WatchRules(
                job.run.timeout_s,
                MeshShape.of(job.plan).describe,
                on_timeout=lambda message: give_up(Failure(env.rank, "timeout", message), tell),
            )
            mesh, watch = join_others(env, device, rules, lambda watch: job_mesh(job, env.rank, device, watch))
        else:
            mesh = job_mesh(job, env.rank, device)
        result = work(job, mesh, folder)
        if watch is not None:
            watch.stop()
            dist.destroy_process_group()
        return result
    except PlanError as error:
        tell(Failure(env.rank, "input", str(error), subject=error.subject, faults=tuple(error.faults)))
        raise SystemExit(2) from None
    except Exception as error:
        give_up(_failure_note(error, env, watch, room), tell)


def _failure_note(error: Exception, env: RankEnvironment, watch: Watch | None, room: int) -> Failure:
    """The note about an error that ends this rank, which had `room` bytes of memory when it began."""
    if isinstance(error, NotMetError):
        return Failure(env.rank, "timeout", error_text(error))
    if isinstance(error, DiskFullError):
        return Failure(env.rank, "disk", error_text(error))
    if isinstance(error, PassingError):
        return Failure(env.rank, "error", error_text(error))
    if isinstance(error, RunError | FloatingPointError):  # the same data would give it again
        return Failure(env.rank, "run", error_text(error))
    if is_out_of_memory(error):
        memory_error = error if isinstance(error, OutOfMemoryError) else OutOfMemoryError(error, None)
        return Failure(env.rank, "memory", error_text(memory_error), room_bytes=room)
    if watch is not None and is_lost_connection(error):
        # Another rank has ended. The launcher ends this one in a moment, unless that rank was on another machine.
        if not is_asked():  # else the launcher that requested this rank to leave ends it, too
            time.sleep(4.0)
        reason = str(error).partition("\n")[0]
        return Failure(
            env.rank,
            "lost",
            say("lost its connection ({reason}); {silent}", reason=reason, silent=watch.silent_ranks(env.world)),
        )
    return Failure(env.rank, "error", f"{type(error).__name__}: {error}", traceback.format_exc())


def join_others(
    env: RankEnvironment, device: torch.device, rules: WatchRules, make: Callable[[Watch], Mesh]
) -> tuple[Mesh, Watch]:
    """Enter the process group of all ranks, and `make` the mesh. The watch runs from the beginning. Raises
    NotMetError."""
    attempt = ""
    if not env.store_is_up:
        _join(env, rules.timeout_s, device, attempt)
    elif env.store_is_used:
        used_store = _store(env, rules.timeout_s, attempt)
        attempt = attempt_name(used_store, env.rank, env.world, rules.timeout_s, rules.describe)
    watch = Watch(_store(env, STORE_S, attempt), env.rank, rules)
    watch.start()
    with watch.waiting(say("joining the others"), tuple(rank for rank in range(env.world) if rank != env.rank)):
        if env.store_is_up:
            _join(env, rules.timeout_s, device, attempt)
        return make(watch), watch


def give_up(failure: Failure, tell: Callable[[Failure], None]) -> None:
    """Tell a failure and end the process at once: other threads may be stuck in a collective that never returns."""
    tell(failure)
    flush_standard_streams()
    os._exit(1)


def _check_world(env: RankEnvironment, job: JobSpec) -> None:
    """Raises PlanError if the number of ranks is not the plan's."""
    plan = job.plan
    if env.world != plan.world:
        fault = say(
            "{started}, and the plan needs {degrees} = {world}; start {world}, or change the plan",
            started=were_started(env.world),
            degrees=plan.degrees,
            world=plan.world,
        )
        raise PlanError("launch", [fault])


def were_started(num_ranks: int) -> Phrase:
    """ "1 rank was started", "8 ranks were started"."""
    if num_ranks == 1:
        return say("1 rank was started")
    return say("{ranks} were started", ranks=counted_phrase(num_ranks, "rank"))


def _join(env: RankEnvironment, timeout_s: float, device: torch.device, attempt: str) -> None:
    """Enter the process group of all ranks. If their store is not up yet, rank 0 hosts it."""
    bound_s = 2 * timeout_s + 10  # longer than the watch waits, which explains a timeout
    store = _store(env, bound_s, attempt) if env.store_is_up else None
    meeting_point: dict[str, Any] = {"store": store, "rank": env.rank, "world_size": env.world} if store else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=bound_s), **meeting_point)


def _store(env: RankEnvironment, timeout_s: float, attempt: str) -> dist.Store:
    """A separate connection to the rendezvous store, so that the watch can use it while the main thread waits."""
    store = dist.TCPStore(env.store_host, env.store_port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"shardwright/{attempt}", store)
