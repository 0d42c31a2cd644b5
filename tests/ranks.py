"""Real Gloo ranks for tests, forked from a server that has torch loaded.

A test over ranks fails, with the traceback of the first rank that did, and never hangs: a rank that dies or takes
too long ends the others.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
# The server of Python 3.11 does not take over sys.path, and would silently preload nothing.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
CONTEXT.set_forkserver_preload(["ranks_preload"])


# A test that hangs fails after this; one that does not may be ten times slower on a machine that others load.
PATIENCE_S = 600.0


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Call `function(rank, store_path, *args)` in `world` processes; returns what each returned, by rank."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        for rank in range(world):
            mine, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank, args=(theirs, function, rank, str(Path(folder, "store")), *args), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append((process, mine))
        try:
            return _collect(ranks, time.monotonic() + timeout_s)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def in_group(rank: int, store: str, world: int, work: Callable[..., Any], *args: Any) -> Any:
    """Do some work on a rank of a process group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    found = work(rank, world, *args)
    dist.destroy_process_group()
    return found


def _rank(connection: Any, function: Callable[..., Any], rank: int, store: str, *args: Any) -> None:
    try:
        message = (True, function(rank, store, *args))
    except BaseException:
        message = (False, traceback.format_exc())
    with suppress(BrokenPipeError):
        # By value: tensors would travel as shared memory of a process that is about to end.
        connection.send_bytes(pickle.dumps(message))


def _collect(ranks: list[tuple[Any, Any]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) < len(ranks):
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} did not end in time")
        for connection in ready:
            rank = waiting[connection]
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                ranks[rank][0].join(5)
                succeeded, value = False, f"rank {rank} died with exit code {ranks[rank][0].exitcode}"
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
