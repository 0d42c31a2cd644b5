"""A run of made-up batches as the loop makes one, on one rank, with faults that a test puts in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.train.build import Replica, build
from shardwright.train.health.run_health import RunHealth
from shardwright.train.health.step_judge import Course
from shardwright.train.train_step import StepResult, train_step
from support.cases import my_tokens

HERE = Path("/nowhere")


@dataclass
class Watched:
    """The record of a rank: its steps, how each went on, its lines, the sentence that ended it, and its state."""

    steps: list[StepResult] = field(default_factory=list)
    courses: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    end: str = ""
    state: list[Tensor] = field(default_factory=list)
    skipped: int = 0
    conclusion: str = ""


def state_of(replica: Replica) -> list[Tensor]:
    """Copies of all values, float32 weights and moments that a rank holds."""
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    held = [[unit.value_shard, *unit.masters.memory(False), *unit.masters.memory(True)] for unit in units]
    return [tensor.clone() for tensors in held for tensor in tensors]


def with_health(job: JobSpec, **fields: Any) -> JobSpec:
    """The job under another watch."""
    health = job.health.model_copy(update=fields)
    return job.model_copy(update={"health": health, "run": job.run.model_copy(update={"log_every": 1})})


Fault = Callable[[Mesh, Replica, int], None]  # is called before each step


def watched_run(
    mesh: Mesh, job: JobSpec, num_steps: int, fault: Fault | None = None, after: Fault | None = None
) -> Watched:
    """Train some steps, with a fault before and another after each."""
    replica, seen = build(job, mesh), Watched()
    health = RunHealth(replica, HERE)
    for step in range(num_steps):
        if fault is not None:
            fault(mesh, replica, step)
        tokens = my_tokens(mesh, job, step)
        health.before_span(step, tokens)
        mesh.ledger.clear()
        with health.recording(step, 1):
            result = train_step(replica, step, tokens, health.judge)
        decision, lines = health.after_span(step, [result], tokens)
        seen.steps.append(result)
        seen.courses.append(decision.course.value)
        seen.lines += lines
        if decision.course in (Course.STOP, Course.REWIND):
            seen.end = decision.sentence
            break
        if after is not None:
            after(mesh, replica, step)
        health.compare_replicas(step + 1)
    seen.state, seen.skipped, seen.conclusion = state_of(replica), health.judge.counts.skipped, health.conclusion()
    return seen


def spoil_gradients(replica: Replica, times: int, value: float = float("nan")) -> None:
    """Let one element of the gradient of the first unit whose reduction starts be wrong, so many times."""
    left = [times]
    units = [unit for shards in replica.shards.values() for unit in shards.units]

    def spoiled(unit: FlatUnit, start: Callable[..., None]) -> Callable[..., None]:
        def start_reduce(*args: Any) -> None:
            if left[0]:
                left[0] -= 1
                parameter = unit.parameters[-1]
                assert parameter.gradient is not None
                parameter.gradient.view(-1)[0] = value
                parameter.has_gradient = True
            start(*args)

        return start_reduce

    for unit in units:
        unit._start_reduce = spoiled(unit, FlatUnit._start_reduce.__get__(unit))  # type: ignore[method-assign]


def heal(replica: Replica) -> None:
    """Take the fault of `spoil_gradients` away."""
    for shards in replica.shards.values():
        for unit in shards.units:
            unit.__dict__.pop("_start_reduce", None)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """True if tensors are equal bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
