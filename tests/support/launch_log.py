"""Launches of a rank in a step on CUDA, in order: products, updates, and the begin and the wait of all that it sends.

On tensors without values, with a record in place of the streams of the device: all of a run is there but time.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.parallel.comm import collectives
from shardwright.parallel.comm.compute_turns import Turns
from shardwright.parallel.pipeline.executor import PipelineExecutor
from shardwright.parallel.zero.master_weights import Masters
from shardwright.train.dry_steps import DrySteps
from shardwright.train.train_step import train_step

PRODUCT, UPDATE, BEGIN, WAIT = "product", "update", "begin", "wait"
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm")


@dataclass(frozen=True)
class Launched:
    """One launch: on a stage's stream, or on the main one (None), by a pass of a pair or not. Of a collective or
    message `about` says which, as "all_reduce tp", and `number` tells it from others."""

    stage: int | None
    beside: str | None
    what: str
    about: str = ""
    number: int = 0


@dataclass
class LaunchLog:
    """Streams of stages that only note what is launched on them, and when they begin after what."""

    turns: Turns
    lines: list[Launched] = field(default_factory=list)
    _mine: threading.local = field(default_factory=threading.local)

    def note(self, what: str, about: str = "", number: int = 0) -> None:
        """Add a line."""
        self.lines.append(Launched(getattr(self._mine, "stage", None), self.turns.beside, what, about, number))

    def fork(self, stages: Iterable[int]) -> None:
        self.note("fork", " ".join(map(str, stages)))

    def join(self, stages: Iterable[int]) -> None:
        self.note("join", " ".join(map(str, stages)))

    def handed_on(self, x: Tensor, stage: int) -> None:
        self.note("handed on", str(stage))

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        self._mine.stage = stage
        with _Operators(self):
            yield
        self._mine.stage = None


class _Operators(TorchDispatchMode):
    """Notes the products of the thread that it is entered on."""

    def __init__(self, log: LaunchLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            self._log.note(PRODUCT)
        return func(*args, **(kwargs or {}))


def launched(job: JobSpec, rank: int) -> list[Launched]:
    """All that a rank launches in a step on CUDA."""
    steps = DrySteps(job, rank, "cuda")
    replica, mesh = steps.replica, steps.mesh
    log = LaunchLog(mesh.turns)
    start, wait, update = collectives._start, collectives.Pending.wait, Masters.begin_step
    numbers: dict[int, tuple[str, int]] = {}
    pending_ones = []  # kept, for their identity

    def noted_start(axis: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        pending = start(axis, kind, *args, **kwargs)
        pending_ones.append(pending)
        numbers[id(pending)] = f"{kind} {axis.name}", len(pending_ones)
        log.note(BEGIN, *numbers[id(pending)])
        return pending

    def noted_wait(pending: Any, keeps_turn: bool = False) -> None:
        if pending._work is not None:
            log.note(WAIT, *numbers[id(pending)])
        wait(pending, keeps_turn)

    def noted_update(*args: Any, **kwargs: Any) -> None:
        log.note(UPDATE)
        update(*args, **kwargs)

    tokens = torch.zeros(
        job.batch.global_batch_size // job.plan.dp, job.model.sequence + 1, dtype=torch.long, device="meta"
    )
    executor = PipelineExecutor(dict(replica.stages), replica.shards, mesh, streams=log)
    with (
        patch.object(collectives, "_start", noted_start), patch.object(collectives.Pending, "wait", noted_wait),
        patch.object(Masters, "begin_step", noted_update), patch.object(replica.executor, "run", executor.run),
    ):  # fmt: skip
        train_step(replica, 0, tokens)
    return log.lines


def work_under(lines: list[Launched], about: str, work: str) -> list[int]:
    """Of each collective or message of a kind, how often some work was launched between its begin and its wait."""
    begins = {line.number: at for at, line in enumerate(lines) if (line.what, line.about) == (BEGIN, about)}
    waits = {line.number: at for at, line in enumerate(lines) if (line.what, line.about) == (WAIT, about)}
    ends = {number: waits.get(number, len(lines)) for number in begins}
    return [sum(line.what == work for line in lines[at : ends[number]]) for number, at in begins.items()]
