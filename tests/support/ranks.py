"""Real Gloo ranks for tests, forked from a server that has torch loaded.

A test over ranks fails, with the traceback of the first rank that did, and never hangs: a rank that dies or takes
too long ends the others.

A forked process copies each page that it writes to, which is half of what a few steps of a small model take. Where a
function leaves nothing behind, its ranks are kept for the next such: each run has a process group of its own.
"""

import atexit
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

CONTEXT = multiprocessing.get_context("forkserver")
# The server of Python 3.11 does not take over sys.path, and would silently preload nothing.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
CONTEXT.set_forkserver_preload(["support.ranks_preload"])


# A test that hangs fails after this; one that does not may be ten times slower on a machine that others load.
PATIENCE_S = 600.0


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


@dataclass(frozen=True)
class _Rank:
    process: Any
    connection: Any
    num_runs: int = 0


# Of a rank that is kept: a graph without a backward holds its groups for ever, and each of these has threads that poll.
_MOST_RUNS = 12
# Ranks that wait for their next run, all alike: each run says which rank it is.
_kept: list[_Rank] = []
_numbers = itertools.count()  # of runs, each with a store of its own
_Function = TypeVar("_Function", bound=Callable[..., Any])


def leaves_nothing(function: _Function) -> _Function:
    """Mark what ranks do as leaving nothing in a process that another run could see: no patch, thread or setting."""
    vars(function)["leaves_nothing"] = True
    return function


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Call `function(rank, store_path, *args)` in `world` processes; returns what each returned, by rank."""
    keeps = hasattr(args[1] if function in (_on_mesh, in_group) else function, "leaves_nothing")
    ranks = [_kept.pop() if keeps and _kept else _forked() for _ in range(world)]
    store = str(_folder_of_stores() / str(next(_numbers)))
    try:
        for rank, forked in enumerate(ranks):
            forked.connection.send_bytes(pickle.dumps((keeps, function, rank, store, args)))
        results = _collect(ranks, time.monotonic() + timeout_s)
        if keeps:
            lived = [replace(forked, num_runs=forked.num_runs + 1) for forked in ranks]
            _kept.extend(forked for forked in reversed(lived) if forked.num_runs < _MOST_RUNS)
            ranks = [forked for forked in lived if forked.num_runs == _MOST_RUNS]
        return results
    finally:
        _end(ranks)


@cache
def _folder_of_stores() -> Path:
    """Where ranks meet, as long as this process lives. A rank that is kept may let go of a store long after its run,
    and torch's destructor of a FileStore opens its file: it ends the process where the folder is gone."""
    folder = tempfile.mkdtemp(prefix="ranks-")

    def end() -> None:
        _end(_kept)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return Path(folder)


def _end(ranks: list[_Rank]) -> None:
    for forked in ranks:
        forked.process.kill()
        forked.process.join()
        forked.connection.close()


def _forked() -> _Rank:
    own, reference = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_live, args=(reference,), daemon=True)
    process.start()
    reference.close()
    return _Rank(process, own)


def in_group(rank: int, store: str, world: int, work: Callable[..., Any], *args: Any) -> Any:
    """Do some work on a rank of a process group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    result = work(rank, world, *args)
    dist.destroy_process_group()
    return result


def _live(connection: Any) -> None:
    """The life of a rank: what it is told to do, until it fails or is not to be kept, or nobody is there to tell it."""
    goes_on = True
    while goes_on:
        try:
            answer = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            goes_on, function, rank, store, args = pickle.loads(answer)
            message = (True, function(rank, store, *args))
        except BaseException:
            goes_on, message = False, (False, traceback.format_exc())
        with suppress(BrokenPipeError):
            # By value: tensors would travel as shared memory of a process that is about to end.
            connection.send_bytes(pickle.dumps(message))
        del answer, message
        gc.collect()  # cycles hold the groups of the run that is over, and these a thread for each pair of ranks


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) < len(ranks):
        waiting = {forked.connection: rank for rank, forked in enumerate(ranks) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} did not end in time")
        for connection in ready:
            rank = waiting[connection]
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = ranks[rank].process
                process.join(5)
                succeeded, value = False, f"rank {rank} died with exit code {process.exitcode}"
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
        if failures:
            # A rank that lost its connection is a consequence: give the cause a moment to show.
            causes = {r: text for r, text in failures.items() if "Connection" not in text}
            if causes or deadline - time.monotonic() < 1 or len(failures) + len(results) == len(ranks):
                rank, text = next(iter((causes or failures).items()))
                raise RankFailedError(f"rank {rank} failed:\n{text}")
            deadline = min(deadline, time.monotonic() + 2.0)
            for rank in failures:
                results[rank] = None
    if failures:
        raise RankFailedError(f"rank {next(iter(failures))} failed:\n{next(iter(failures.values()))}")
    return [results[rank] for rank in range(len(ranks))]


def run_on_mesh(job: Any, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Call `function(mesh, *args)` on every rank of a job's plan; one rank runs in this process."""
    if job.plan.world == 1:
        return [_on_mesh(0, "", job, function, *args)]
    return run_ranks(job.plan.world, _on_mesh, job, function, *args, timeout_s=timeout_s)


def _on_mesh(rank: int, store: str, job: Any, function: Callable[..., Any], *args: Any) -> Any:
    import torch
    import torch.distributed as dist

    from shardwright.train.build import job_mesh

    torch.set_num_threads(1)
    world = job.plan.world
    if world > 1:
        timeout = timedelta(seconds=PATIENCE_S)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout
        )
    result = function(job_mesh(job, rank, torch.device("cpu")), *args)
    if world > 1:
        dist.destroy_process_group()
    return result
