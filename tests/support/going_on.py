"""Work of ranks that save a checkpoint or go on from one, beside their tests: each rank imports this, and no jobs."""

from functools import partial
from pathlib import Path

import torch

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.train.async_step import train_stream
from shardwright.train.build import Replica, build
from shardwright.train.checkpoint.boxes import HeldBox
from shardwright.train.checkpoint.compression_state import CompressionState
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.cases import my_tokens
from support.ranks import leaves_nothing

STEPS = 2
Boxes = dict[str, torch.Tensor]


def steps(replica: Replica, mesh: Mesh, job: JobSpec, first: int, end: int) -> list[float]:
    """The losses of some steps."""
    if replica.program.weights != "current":
        tokens = partial(my_tokens, mesh, job)
        program = job_program(job, end - first)
        results = train_stream(replica, program, first, batch_of=lambda i: tokens(first + i))
        return [result.loss for result in results]
    return [train_step(replica, step, my_tokens(mesh, job, step)).loss for step in range(first, end)]


def state(replica: Replica, mesh: Mesh) -> Boxes:
    """All that this rank would write, by name and place."""
    return {f"{box.name} {box.box}": box.values for box in SavedState(replica, mesh).held()}


@leaves_nothing
def save_and_go_on(mesh: Mesh, job: JobSpec, folder: Path) -> tuple[list[float], Boxes]:
    replica = build(job, mesh)
    steps(replica, mesh, job, 0, STEPS)
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(STEPS, STEPS * job.batch.global_batch_size, 0, {})
    writer.wait()
    return steps(replica, mesh, job, STEPS, 2 * STEPS), state(replica, mesh)


@leaves_nothing
def go_on(mesh: Mesh, job: JobSpec, folder: Path) -> tuple[list[float], Boxes]:
    begun = begin(job, mesh, folder)
    assert (begun.step, begun.samples) == (STEPS, STEPS * job.batch.global_batch_size), begun.lines
    return steps(begun.replica, mesh, job, STEPS, 2 * STEPS), state(begun.replica, mesh)


@leaves_nothing
def save_and_tell(mesh: Mesh, job: JobSpec, folder: Path) -> list[HeldBox]:
    replica = build(job, mesh)
    steps(replica, mesh, job, 0, STEPS)
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(STEPS, STEPS * job.batch.global_batch_size, 0, {})
    writer.wait()
    return list(CompressionState(replica, mesh).held())


@leaves_nothing
def go_on_and_tell(mesh: Mesh, job: JobSpec, folder: Path) -> list[HeldBox]:
    return list(CompressionState(begin(job, mesh, folder).replica, mesh).held())


@leaves_nothing
def began_anew(mesh: Mesh, job: JobSpec, folder: Path) -> bool:
    begun = begin(job, mesh, folder)
    first = build(job, mesh)
    own, new = state(begun.replica, mesh), state(first, mesh)
    is_told = any("is not whole" in line for line in begun.lines)
    return begun.step == 0 and is_told and all(torch.equal(own[name], new[name]) for name in new)


def refusal(mesh: Mesh, job: JobSpec, folder: Path) -> list[str]:
    try:
        begin(job, mesh, folder)
    except PlanError as error:
        return sorted(fault.split()[1] for fault in error.faults)
    return []


@leaves_nothing
def save_and_load_in_memory(mesh: Mesh, job: JobSpec, folder: Path) -> tuple[list[float], list[float]]:
    return save_and_go_on(mesh, job, folder)[0], go_on(mesh, job, folder)[0]


@leaves_nothing
def go_on_and_hold(mesh: Mesh, job: JobSpec, folder: Path) -> list[HeldBox]:
    return SavedState(begin(job, mesh, folder).replica, mesh).held()
