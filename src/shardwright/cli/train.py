"""The command that trains: it launches the ranks of this machine, or is one rank of torchrun's or Slurm's."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.checked_job import load_to_run
from shardwright.cli.job_options import JobCommand, job_options
from shardwright.cli.plan_for_world import for_world
from shardwright.train.launch import preemption
from shardwright.train.launch.ending import die_of_signals

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec
    from shardwright.parallel.comm.process_groups import Mesh
    from shardwright.train.launch.rank_environment import RankEnvironment
    from shardwright.train.launch.rank_life import Failure, Work

# What all ranks refuse, rank 0 says. torchrun ends them all when the first one leaves, so the others stay a while.
SPEAKING_S = 10.0


@click.command(cls=JobCommand)
@job_options
@click.option("--fresh", is_flag=True, help="Begin anew: put aside the checkpoints that the run's folder has.")
@click.option(
    "--from", "weights_from", default=None, metavar="RUN",
    help="Begin with the weights of another run's newest checkpoint, where this one has none yet: its folder, or the "
    "folder or address of its checkpoints.",
)  # fmt: skip
def train(job: str, overrides: tuple[str, ...], as_json: bool, fresh: bool, weights_from: str | None) -> None:
    """Train JOB. Starts the local ranks itself; under torchrun it is one of them. A run whose folder has a checkpoint
    goes on from it."""
    spec = load_to_run(job, overrides)
    from shardwright.train.launch.rank_environment import RankEnvironment

    seat = RankEnvironment.from_environment()
    if seat is not None:
        die_of_signals()
        spec = _for_its_world(spec, seat)
    # What has nothing to save ends with a signal as any command does.
    heard = preemption.heard() if spec.checkpoint.is_on and seat is None else nullcontext(None)
    with heard as asked, _standard_output_for_json_alone(as_json):
        begins = _Begins(fresh, weights_from)
        result, folder = _run_here(spec, asked, begins) if seat is None else _run_rank(spec, seat, begins)
        speaks = seat is None or seat.rank == 0
        if spec.model.moe.experts and speaks:
            from shardwright.report.expert_use import draw_use

            click.echo(f"how experts were used: {draw_use(folder)}")
        found = _compared(spec, result, folder) if speaks else None
    if as_json and speaks:
        click.echo(json.dumps(asdict(result) | {"predicted_and_measured": found}))
    if result.preempted:
        if speaks:
            by = asked.signal if asked is not None else None
            click.echo(preemption.saved_sentence(by, result.steps), err=True)
        sys.exit(preemption.STATUS)


@dataclass(frozen=True)
class _Begins:
    """How a run begins: without the checkpoints that its folder has, and with whose weights."""

    fresh: bool
    weights_from: str | None


def _compared(spec: "JobSpec", result: Any, folder: Path) -> "dict[str, Any] | None":
    """Say what was predicted of the steps beside what was measured, and keep it with the metrics. Returns the same."""
    if result.measured is None or result.preempted:  # who asks a run to leave does not wait long
        return None
    from shardwright.report.run_comparison import compared_dict, compared_text
    from shardwright.train.launch.full_disk import telling_of_full_disk

    found = compared_dict(spec, result.measured)
    click.echo(compared_text(found))
    metrics = folder / "metrics.jsonl"
    with telling_of_full_disk(metrics), metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"predicted_and_measured": found}) + "\n")
    return found


def _run_here(spec: "JobSpec", asked: preemption.Preemption | None, begins: _Begins) -> tuple[Any, Path]:
    """Launch all ranks on this machine. Returns what rank 0 returned, and the run's folder."""
    from shardwright.train.launch.fork_server import start_server_early

    start_server_early(spec.run.device)
    from shardwright.train.checkpoint.kept import put_aside
    from shardwright.train.checkpoint.other_job import refuse_weights_from
    from shardwright.train.checkpoint.starting_weights import refuse_weights
    from shardwright.train.data.prepare import prepare_tokens
    from shardwright.train.data.progress import say_aside
    from shardwright.train.data.token_cache import remove_unfinished
    from shardwright.train.launch.launch import RankFailedError, cluster_faults, launch, machine_faults
    from shardwright.train.launch.restarts import launch_with_restarts
    from shardwright.train.launch.run_folder import folder_faults, folder_of, holding, holding_checkpoints

    def tell(error: RankFailedError, restart: str) -> None:
        click.echo(f"failed: {error}{_advice(spec, error.failure)}\n{restart}", err=True)

    folder = folder_of(spec)
    faults = cluster_faults(spec) or machine_faults(spec)
    with holding(folder, faults + folder_faults(folder)):  # known before much text is read
        remove_unfinished(folder / "data")
        prepare_tokens(spec.data, spec.model, spec.run.seed, folder / "data", say=say_aside)
        if begins.weights_from is not None:
            refuse_weights_from(spec, begins.weights_from)
        refuse_weights(spec, folder, is_anew=begins.fresh)
        if begins.fresh:
            with holding_checkpoints(spec, folder):
                for line in put_aside(spec, folder):
                    click.echo(f"--fresh: {line}")
        work = _work(spec, begins.weights_from or "")
        try:
            with holding_checkpoints(spec, folder):
                if asked is None:
                    return launch(work, spec, folder)[0], folder
                return launch_with_restarts(work, spec, folder, asked, tell)[0], folder
        except RankFailedError as error:
            raise RankFailedError(f"{error}{_advice(spec, error.failure)}", error.failure) from None


def _run_rank(spec: "JobSpec", seat: "RankEnvironment", begins: _Begins) -> tuple[Any, Path]:
    """Be one rank. Returns what it returned, and the run's folder."""
    from shardwright.config.base import PlanError
    from shardwright.train.checkpoint.other_job import refuse_weights_from
    from shardwright.train.data.token_cache import remove_unfinished
    from shardwright.train.launch.rank_life import run_rank
    from shardwright.train.launch.run_folder import folder_faults, folder_of, holding, holding_checkpoints, this_node

    if begins.fresh:  # a rank that is started anew can't know whether the run has begun
        raise PlanError("train --fresh", ["under torchrun a run begins anew in another run.folder; name one"])
    if begins.weights_from is not None:
        refuse_weights_from(spec, begins.weights_from)
    folder = folder_of(spec)
    alone = holding(folder, folder_faults(folder)) if seat.rank == 0 else nullcontext()
    writes_alone = holding_checkpoints(spec, folder) if seat.rank == 0 else nullcontext()
    is_first_of_node, is_on = seat.local_rank == 0 < seat.rank, spec.checkpoint.is_on
    if is_first_of_node and (faults := folder_faults(folder)):
        raise PlanError(this_node(), faults)
    work = _work(spec, begins.weights_from or "")
    if is_first_of_node and is_on:
        work = partial(_work_in_a_shared_folder, work)
    heeded = preemption.heeded(before_a_look=preemption.leave_early(seat.rank)) if is_on else nullcontext()
    with alone, writes_alone, heeded:
        if seat.rank == 0:
            remove_unfinished(folder / "data")
        return run_rank(seat, work, spec, folder, _teller(spec, seat)), folder


def _work_in_a_shared_folder(work: "Work", job: "JobSpec", mesh: "Mesh", folder: Path) -> Any:
    """What the first rank of another machine than rank 0's does: the checkpoints' folder must be that of rank 0."""
    from shardwright.config.base import PlanError
    from shardwright.train.launch.run_folder import SHARED_S, shared_place, this_node, unshared_faults

    place = shared_place(job, folder)
    if place is not None and (faults := unshared_faults(place[0], min(SHARED_S, job.run.timeout_s / 2), place[1])):
        raise PlanError(this_node(), faults)
    return work(job, mesh, folder)


def _for_its_world(spec: "JobSpec", seat: "RankEnvironment") -> "JobSpec":
    """The job under a plan for as many ranks as there are. Rank 0 says which, or why there is none."""
    from shardwright.config.base import PlanError

    try:
        found, note = for_world(spec, seat.world)
    except PlanError:
        if seat.rank == 0:
            raise
        time.sleep(SPEAKING_S)
        sys.exit(2)
    if note and seat.rank == 0:
        click.echo(note, err=True)
    return found


def _work(spec: "JobSpec", weights_from: str) -> "Work":
    """What each rank does."""
    from shardwright.account.job_memory import job_memory
    from shardwright.cost.failures import best_interval
    from shardwright.train.trainer import RunStart
    from shardwright.train.trainer import train as train_on_rank

    return partial(train_on_rank, start=RunStart(job_memory(spec), weights_from, best_interval(spec)))


def _teller(spec: "JobSpec", seat: "RankEnvironment") -> "Callable[[Failure], None]":
    """How a rank of torchrun's says why it fails."""
    from shardwright.sharding.mesh import MeshShape
    from shardwright.train.launch.rank_life import OF_ALL_RANKS
    from shardwright.train.launch.run_folder import this_node

    def tell(failure: "Failure") -> None:
        if seat.rank > 0 and failure.kind in OF_ALL_RANKS and failure.subject != this_node():
            time.sleep(SPEAKING_S)
        else:
            click.echo(failure.sentence(MeshShape.of(spec.plan)) + _advice(spec, failure), err=True)

    return tell


def _advice(spec: "JobSpec", failure: "Failure | None") -> str:
    """A way out of a failure, if there is more to say than the failure does."""
    if failure is None or failure.kind != "memory":
        return ""
    from shardwright.measure.memory_advice import way_out

    return "\n" + way_out(spec, failure.room_bytes)


@contextmanager
def _standard_output_for_json_alone(active: bool) -> Iterator[None]:
    """While it lasts, what ranks print goes to standard error."""
    if not active:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
