"""A job, trained: by ranks that are started on this machine, or as one rank of torchrun's or Slurm's."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.api.plan_for_world import for_world
from shardwright.api.shown import Shown
from shardwright.config.base import PlanError
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.train.launch import preemption
from shardwright.train.launch.ending import die_of_signals
from shardwright.train.launch.rank_environment import RankEnvironment, allowed_threads

if TYPE_CHECKING:
    from shardwright.parallel.comm.process_groups import Mesh
    from shardwright.train.launch.rank_life import Failure, Work

# What all ranks refuse, rank 0 says. torchrun ends them all when the first one leaves, so the others stay a while.
SPEAKING_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Begins:
    """How a run begins: without the checkpoints that its folder has, and with whose weights. `tell` is told what is of
    interest beside the result, and `warn` what went wrong on the way."""

    fresh: bool = False
    weights_from: str | None = None
    tell: Say = print
    warn: Say = field(default=partial(print, file=sys.stderr))


@dataclass(frozen=True, repr=False)
class Trained(Shown):
    """A run that has ended: its losses in nats a token, where its files are, and what was predicted of its steps beside
    what was measured. `preempted` where it was asked to leave: it has saved, and the same call goes on."""

    name: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    unigram_loss: float | None
    validation_losses: dict[str, float | None]
    sample: str
    folder: Path
    seconds: float
    preempted: bool
    speaks: bool  # whether this process is the one that tells: rank 0, or who started the ranks
    preempted_by: int | None
    values: dict[str, Any]
    compared: str = ""

    @property
    def text(self) -> str:
        held_out = "" if self.validation_loss is None else f", {self.validation_loss:.4f} on held-out text"
        losses = "nothing was left to do"
        if self.first_loss is not None and self.last_loss is not None:
            losses = f"loss from {self.first_loss:.4f} to {self.last_loss:.4f} nats a token{held_out}"
        ended = "; it was asked to leave, and goes on where it is" if self.preempted else ""
        done = f"{self.name}: {counted(self.steps, 'step')} done in {self.seconds:.0f} s, {losses}{ended}"
        files = f"metrics in {self.folder}/metrics.jsonl and {self.folder}/tensorboard"
        return "\n".join(filter(None, (done, files, self.compared)))

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the run's metrics: one for each step and for each evaluation."""
        from shardwright.train.run_files import METRICS

        with (self.folder / METRICS).open(encoding="utf-8") as file:
            return [flat_keys(line) for line in map(json.loads, file) if "step" in line]


def train_job(spec: JobSpec, begins: Begins = Begins()) -> Trained:
    """Train a checked job: start the ranks of this machine, or be one of those that torchrun or Slurm has started. A
    run whose folder has a checkpoint goes on from it. Raises PlanError, RunError."""
    seat = RankEnvironment.from_environment()
    if seat is not None:
        die_of_signals()
        spec = _for_its_world(spec, seat, begins)
    heard: AbstractContextManager[preemption.Preemption | None] = nullcontext(None)
    if seat is None:  # what has nothing to save ends with a signal as any command does
        heard = preemption.heard() if spec.checkpoint.is_on else preemption.unkept()
    with heard as asked:
        result, folder = _run_here(spec, asked, begins) if seat is None else _run_rank(spec, seat, begins)
        speaks = seat is None or seat.rank == 0
        if spec.model.moe.experts and speaks:
            from shardwright.report.expert_use import draw_use

            begins.tell(f"how experts were used: {draw_use(folder)}")
        compared, text = _compared(spec, result, folder) if speaks else (None, "")
    given = {name: getattr(result, name) for name in ("steps", "first_loss", "last_loss", "validation_loss",
             "unigram_loss", "validation_losses", "sample", "seconds", "preempted")}  # fmt: skip
    return Trained(
        name=spec.name, folder=folder, speaks=speaks, preempted_by=asked.signal if asked is not None else None,
        values=asdict(result) | {
            "validation_loss": result.validation_loss, "unigram_loss": result.unigram_loss,
            "predicted_and_measured": compared,
        }, compared=text, **given,
    )  # fmt: skip


def _compared(spec: JobSpec, result: Any, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The predicted steps beside the measured ones, kept with the metrics; and the comparison in words."""
    if result.measured is None or result.preempted:  # who asks a run to leave does not wait long
        return None, ""
    from shardwright.report.run_comparison import compared_dict, compared_text
    from shardwright.train.launch.full_disk import telling_of_full_disk
    from shardwright.train.run_files import METRICS, open_to_append

    found = compared_dict(spec, result.measured)
    metrics = folder / METRICS
    with telling_of_full_disk(metrics), open_to_append(metrics) as file:
        file.write(json.dumps({"predicted_and_measured": found}) + "\n")
    return found, compared_text(found)


def _run_here(spec: JobSpec, asked: preemption.Preemption | None, begins: Begins) -> tuple[Any, Path]:
    """Launch all ranks on this machine. Returns what rank 0 returned, and the run's folder."""
    from shardwright.train.launch.fork_server import start_server_early

    start_server_early(spec.run.device)
    from shardwright.train.checkpoint.kept import put_aside
    from shardwright.train.checkpoint.other_job import refuse_weights_from
    from shardwright.train.checkpoint.starting_weights import refuse_weights
    from shardwright.train.data.prepare import prepare_tokens, refuse_missing
    from shardwright.train.data.progress import say_aside
    from shardwright.train.data.token_cache import remove_unfinished
    from shardwright.train.launch.launch import RankFailedError, cluster_faults, launch, machine_faults
    from shardwright.train.launch.restarts import launch_with_restarts
    from shardwright.train.launch.run_folder import (
        folder_faults,
        folder_of,
        holding,
        holding_checkpoints,
        leaving_no_empty,
    )
    from shardwright.train.launch.this_machine import on_this_machine

    def tell(error: RankFailedError, restart: str) -> None:
        begins.warn(f"failed: {error}{_advice(spec, error.failure)}\n{restart}")

    folder, spec = folder_of(spec), on_this_machine(spec, spec.plan.world, begins.warn)
    faults = cluster_faults(spec) or machine_faults(spec)
    with (
        leaving_no_empty(folder),
        holding(folder, faults + folder_faults(folder)),
        holding_checkpoints(spec, folder),  # before much text is read, as all that may be refused
    ):
        if begins.weights_from is not None:
            refuse_weights_from(spec, begins.weights_from)
        refuse_weights(spec, folder, is_anew=begins.fresh)  # before the tokens, which can take an hour
        remove_unfinished(folder / "data")
        refuse_missing(spec.data, spec.model)
        prepare_tokens(spec.data, spec.model, spec.run.seed, folder / "data", say=say_aside)
        if begins.fresh:
            for line in put_aside(spec, folder):
                begins.tell(f"--fresh: {line}")
        work = _work(spec, begins.weights_from or "")
        try:
            if asked is None:
                return launch(work, spec, folder)[0], folder
            return launch_with_restarts(work, spec, folder, asked, tell)[0], folder
        except RankFailedError as error:
            raise RankFailedError(f"{error}{_advice(spec, error.failure)}", error.failure) from None


def _run_rank(spec: JobSpec, seat: RankEnvironment, begins: Begins) -> tuple[Any, Path]:
    """Be one rank. Returns what it returned, and the run's folder."""
    from shardwright.train.checkpoint.other_job import refuse_weights_from
    from shardwright.train.launch.run_folder import folder_of, leaving_no_empty
    from shardwright.train.launch.this_machine import on_this_machine

    if begins.fresh:  # a rank that is started anew can't know whether the run has begun
        raise PlanError("train --fresh", ["under torchrun a run begins anew in another run.folder; name one"])
    if begins.weights_from is not None:
        refuse_weights_from(spec, begins.weights_from)
    spec = on_this_machine(spec, 1, begins.warn)  # each rank was given its device, if there are any
    folder = folder_of(spec)
    with leaving_no_empty(folder) if seat.rank == 0 else nullcontext():
        return _run_rank_in(folder, spec, seat, begins), folder


def _run_rank_in(folder: Path, spec: JobSpec, seat: RankEnvironment, begins: Begins) -> Any:
    """Be one rank of a run that writes to a folder. Returns what it returned."""
    from shardwright.train.data.token_cache import remove_unfinished
    from shardwright.train.launch.rank_life import run_rank
    from shardwright.train.launch.run_folder import folder_faults, holding, holding_checkpoints, this_node

    alone = holding(folder, folder_faults(folder)) if seat.rank == 0 else nullcontext()
    writes_alone = holding_checkpoints(spec, folder) if seat.rank == 0 else nullcontext()
    is_first_of_node, is_on = seat.local_rank == 0 < seat.rank, spec.checkpoint.is_on
    if is_first_of_node and (faults := folder_faults(folder)):
        raise PlanError(this_node(), faults)
    work = _work(spec, begins.weights_from or "")
    if is_first_of_node and is_on:
        work = partial(_work_in_a_shared_folder, work)
    leaves_early = preemption.leave_early(seat.rank)
    heeded: AbstractContextManager[None] = nullcontext()
    if is_on:
        heeded = preemption.heeded(before_a_look=leaves_early, hears_interrupts=True, tells=seat.rank == 0)
    with alone, writes_alone, heeded:
        if seat.rank == 0:
            remove_unfinished(folder / "data")
        return run_rank(seat, work, spec, folder, _teller(spec, seat, begins), allowed_threads())


def _work_in_a_shared_folder(work: "Work", job: JobSpec, mesh: "Mesh", folder: Path) -> Any:
    """The work of the first rank of another machine than rank 0's: the checkpoints' folder must be that of rank 0."""
    from shardwright.train.launch.run_folder import SHARED_S, shared_place, this_node, unshared_faults

    place = shared_place(job, folder)
    if place is not None and (faults := unshared_faults(place[0], min(SHARED_S, job.run.timeout_s / 2), place[1])):
        raise PlanError(this_node(), faults)
    return work(job, mesh, folder)


def _for_its_world(spec: JobSpec, seat: RankEnvironment, begins: Begins) -> JobSpec:
    """The job under a plan for as many ranks as there are. Rank 0 says which, or why there is none."""

    try:
        found, note = for_world(spec, seat.world)
    except PlanError:
        if seat.rank == 0:
            raise
        time.sleep(SPEAKING_S)
        sys.exit(2)
    if note and seat.rank == 0:
        begins.warn(note)
    return found


def _work(spec: JobSpec, weights_from: str) -> "Work":
    """The work of each rank."""
    from shardwright.account.job_memory import job_memory
    from shardwright.cost.failures import best_interval
    from shardwright.train.trainer import train as train_on_rank
    from shardwright.train.training_run import RunStart

    return partial(train_on_rank, start=RunStart(job_memory(spec), weights_from, best_interval(spec)))


def _teller(spec: JobSpec, seat: RankEnvironment, begins: Begins) -> "Callable[[Failure], None]":
    """How a rank of torchrun's says why it fails."""
    from shardwright.sharding.mesh import MeshShape
    from shardwright.train.launch.rank_life import OF_ALL_RANKS
    from shardwright.train.launch.run_folder import this_node

    def tell(failure: "Failure") -> None:
        if seat.rank > 0 and failure.kind in OF_ALL_RANKS and failure.subject != this_node():
            time.sleep(SPEAKING_S)
        else:
            begins.warn(failure.sentence(MeshShape.of(spec.plan)) + _advice(spec, failure))

    return tell


def _advice(spec: JobSpec, failure: "Failure | None") -> str:
    """A way out of a failure, if there is more to say than the failure does."""
    if failure is None or failure.kind != "memory":
        return ""
    from shardwright.measure.memory_advice import way_out

    return "\n" + way_out(spec, failure.room_bytes)
