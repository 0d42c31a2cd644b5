"""Parts that the benchmarks share: two Gloo ranks, and functions that are timed in turn.

On a machine that others use too, seconds say little. So a benchmark times ours and the baseline alternately in the
same processes, divides the two times of each round, and reports the median of these ratios with their quartiles.
A cause that slows the machine down for a while slows both, and falls out.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.hang_watch import Watch, WatchRules
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import job_mesh

WORLD = 2
TIMEOUT_S = 60.0
WARMUP = 3
LEAST_ROUNDS = 8


@dataclass(frozen=True)
class Ratio:
    """Ours over the baseline, of one round each; below 1 ours is faster. `cpu` is the same of processor seconds."""

    wall: tuple[float, float, float]  # first quartile, median, third quartile
    cpu: tuple[float, float, float]
    rounds: int

    def cells(self) -> list[str]:
        """For a row of a table with RATIO_HEADER."""
        both = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in (self.wall, self.cpu)]
        return [*both, str(self.rounds)]


RATIO_HEADER = ["time, ours / theirs [quartiles]", "processor time", "rounds"]


def ratio_text(numerators: list[float], denominators: list[float]) -> str:
    """The median of the ratios of each round, with their quartiles in brackets."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def run_two_ranks(work: Callable[[Mesh, JobSpec], None], job: dict[str, Any]) -> None:
    """Call `work` with the mesh and the job on two forked ranks of one thread each."""
    run_ranks(work, job, WORLD)


def run_ranks(
    work: Callable[[Mesh, JobSpec], None], job: dict[str, Any], world: int, enter: Callable[[int], None] | None = None
) -> None:
    """The same on `world` ranks. `enter` is called with the rank first of all, before there is any connection."""
    # One thread before the fork: an OpenMP pool does not survive it.
    torch.set_num_threads(1)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # the first optimizer imports much; the ranks find it loaded
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        start_processes(_rank, (work, make_job(job), folder, world, enter), nprocs=world, start_method="fork")


def _rank(
    rank: int, work: Callable[[Mesh, JobSpec], None], job: JobSpec, folder: str, world: int,
    enter: Callable[[int], None] | None,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    if enter is not None:
        enter(rank)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(folder, "ranks")), world), rank=rank, world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    # A training run is always watched: what that costs is part of our times.
    store = dist.FileStore(str(Path(folder, "watch")), world)
    watch = Watch(store, rank, WatchRules(TIMEOUT_S, MeshShape.of(job.plan).describe, _give_up))
    watch.start()
    work(job_mesh(job, rank, torch.device("cpu"), watch), job)
    dist.barrier()
    watch.stop()
    dist.destroy_process_group()


def plain_stage(job: JobSpec, index: int = 0) -> DecoderStage:
    """A stage of the job's model, not cut over tp and not part of a runtime of ours: what a baseline wraps."""
    device = torch.device("cpu")
    alone = Axis("tp", (0,), 0, None, Ledger(device), None)
    span = stage_span(job.plan, job.model.layers, index)
    return DecoderStage(job.model, span, LayerSharding.of_tp(alone)).initialise(job.run.seed, device)


def resized(job: JobSpec, **sections: dict[str, Any]) -> JobSpec:
    """The job with some fields changed, by section."""
    changed = {name: getattr(job, name).model_copy(update=fields) for name, fields in sections.items()}
    return job.model_copy(update=changed)


def _give_up(message: str) -> None:
    """End a rank that waits for another in vain; the launcher then ends the other."""
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def alternate(ours: Callable[[], object], baseline: Callable[[], object], most_rounds: int, most_s: float) -> Ratio:
    """Time the two in turn, until there are enough rounds or `most_s` is over; who begins a round alternates.

    Every rank must call this. A call takes as long as its slower rank; both ranks begin it together. Processor
    seconds are summed over the ranks.
    """
    functions = (ours, baseline)
    for _ in range(WARMUP):
        for function in functions:
            function()
    wall_s, cpu_s = (torch.zeros(most_rounds, len(functions), dtype=torch.float64) for _ in range(2))
    gc.collect()
    gc.disable()  # a collection would hit the one or the other by chance
    begin_s = time.perf_counter()
    done = 0
    while done < most_rounds and (done < LEAST_ROUNDS or done % 2 or _agree(time.perf_counter() - begin_s < most_s)):
        for which in (0, 1) if done % 2 == 0 else (1, 0):
            dist.barrier()
            cpu_start_s, start_s = time.process_time(), time.perf_counter()
            functions[which]()
            wall_s[done, which] = time.perf_counter() - start_s
            cpu_s[done, which] = time.process_time() - cpu_start_s
        done += 1
    gc.enable()
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s)
    return Ratio(_quartiles(wall_s[:done]), _quartiles(cpu_s[:done]), done)


def _agree(goes_on: bool) -> bool:
    """True if all ranks go on."""
    goes = torch.tensor(int(goes_on))
    dist.all_reduce(goes, dist.ReduceOp.MIN)
    return bool(goes)


def _quartiles(seconds: Tensor) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles((seconds[:, 0] / seconds[:, 1]).tolist(), n=4, method="inclusive")
    return low, middle, high


def check_close(what: str, ours: Tensor, baseline: Tensor, relative: float = 1e-4) -> None:
    """Fail where the two differ by more than rounding: norm of the difference over norm of the baseline's."""
    difference = (torch.linalg.vector_norm(ours - baseline) / torch.linalg.vector_norm(baseline)).item()
    if not difference <= relative:
        raise AssertionError(f"{what} differs from the baseline's by {difference:.1e} of its norm")


def print_row(cells: list[str], is_header: bool = False) -> None:
    """A row of a Markdown table, on the first rank's output."""
    if dist.get_rank() == 0:
        print("| " + " | ".join(cells) + " |", flush=True)
        if is_header:
            print("|" + " --- |" * len(cells), flush=True)
