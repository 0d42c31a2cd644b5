"""One collective, timed on ranks of this machine: over Gloo on its cores, or over NCCL on its devices."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.phrase import Phrase, say
from shardwright.config.progress_records import tell_share
from shardwright.config.units import bytes_text, counted_phrase, seconds_text
from shardwright.parallel.comm.collectives import (
    Axis,
    all_gather,
    all_reduce,
    all_reduce_max,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from shardwright.parallel.comm.ledger import INSIDE
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.collective_steps import CollectiveKind
from shardwright.train.launch.launch import launch
from shardwright.train.launch.out_of_memory import available_bytes
from shardwright.train.launch.scratch_folder import scratch_folder

_LEAST_RUNS, _MOST_RUNS, _MOST_S = 3, 200, 2.0
_COPIES = 3  # of the tensor on a rank: its own, the result, and what a library copies


@dataclass(frozen=True)
class CollectiveRun:
    """The measured seconds of a collective, those of its slowest rank, and what the ledgers counted for one: the bytes
    of the full tensor, and those that each rank sent."""

    backend: str
    seconds: float
    num_runs: int
    num_bytes: int
    sent_bytes: list[int]

    @property
    def text(self) -> Phrase:
        """One sentence."""
        return say(
            "Here, over {backend}: {seconds}, the median of {count}; the busiest rank sends {bytes}, as the ledger "
            "counts.",
            backend=self.backend,
            seconds=seconds_text(self.seconds),
            count=self.num_runs,
            bytes=bytes_text(max(self.sent_bytes)),
        )


def run_collective(kind: CollectiveKind, num_ranks: int, num_bytes: int, device: str = "cpu") -> CollectiveRun:
    """Time a collective on this machine. PlanError if it can't start the ranks or has too little memory for them."""
    needed_bytes, free_bytes = _COPIES * num_ranks * num_bytes, available_bytes()
    if 0 < free_bytes < needed_bytes:
        fault = say(
            "{ranks} ranks with {copies} tensors of {size} take {needed}, and this machine has {free} free; ask for "
            "fewer --bytes or --ranks",
            ranks=num_ranks,
            copies=_COPIES,
            size=bytes_text(num_bytes),
            needed=bytes_text(needed_bytes),
            free=bytes_text(free_bytes),
        )
        raise PlanError("collective --run", [fault])
    job = make_job(
        {
            "name": "collective",
            "model": {"layers": 1, "hidden": 64, "heads": 1, "vocab": 64, "sequence": 16},
            "plan": {"dp": num_ranks},
            "batch": {"global_batch_size": num_ranks},
            "cluster": {"devices_per_node": num_ranks},  # a ledger counts sent bytes by the borders of nodes
            "run": {"device": device},
        },
        "collective --run",
    )
    tell_share(say("timing it on {ranks}", ranks=counted_phrase(num_ranks, "rank")), 0.0)
    with scratch_folder() as scratch:
        runs: list[CollectiveRun] = launch(partial(_timed, kind, num_bytes), job, scratch)
    first, sent_bytes = runs[0], [run.sent_bytes[0] for run in runs]
    return replace(first, seconds=max(run.seconds for run in runs), sent_bytes=sent_bytes)


def _timed(kind: CollectiveKind, num_bytes: int, job: JobSpec, mesh: Mesh, folder: Path) -> CollectiveRun:
    """The runs of one rank. All ranks make as many: as the slowest of the first run has time for."""
    axis = mesh.dp
    carry = _call(kind, axis, max(1, num_bytes // 4 // axis.size) * axis.size)
    first_s = torch.tensor([_seconds(carry, axis)], dtype=torch.float64, device=mesh.device)
    num_runs = max(_LEAST_RUNS, min(_MOST_RUNS, int(_MOST_S / mesh.numbers(all_reduce_max(first_s, axis))[0])))
    samples = [_seconds(carry, axis) for _ in range(num_runs)]
    axis.ledger.clear()
    carry()
    num_bytes = sum(tally.num_bytes for tally in axis.ledger.tallies.values())
    backend = "Gloo" if mesh.device.type == "cpu" else "NCCL"
    return CollectiveRun(backend, median(samples), num_runs, num_bytes, [axis.ledger.sent_bytes(INSIDE)])


def _seconds(carry: Callable[[], object], axis: Axis) -> float:
    """Seconds from a moment that all ranks share until this rank's part is over."""
    barrier(axis)
    start_s = time.perf_counter()
    carry()
    if axis.ledger.device.type == "cuda":
        torch.cuda.synchronize(axis.ledger.device)
    return time.perf_counter() - start_s


def _call(kind: CollectiveKind, axis: Axis, elements: int) -> Callable[[], object]:
    """A call of the collective on a tensor of float32 numbers, whose root is index 0."""
    device, is_root = axis.ledger.device, axis.index == 0
    full, share = torch.ones(elements, device=device), torch.ones(elements // axis.size, device=device)
    calls: dict[CollectiveKind, Callable[[], object]] = {
        "broadcast": partial(broadcast, full, axis, 0),
        "scatter": partial(scatter, share, full if is_root else None, axis, 0),
        "gather": partial(gather, full if is_root else None, share, axis, 0),
        "reduce": partial(reduce, full, axis, 0),
        "all-gather": partial(all_gather, share, axis),
        "reduce-scatter": partial(reduce_scatter, full, axis),
        "all-reduce": partial(all_reduce, full, axis),
        "all-to-all": partial(all_to_all, full, axis),
    }
    return calls[kind]
