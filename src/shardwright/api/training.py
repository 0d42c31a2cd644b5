"""Training of a job: by ranks that are started on this machine, or as one rank that torchrun or Slurm has started."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.api.plan_for_world import for_world
from shardwright.api.reported_run import ReportedRun
from shardwright.api.run_start import cost_text, refuse_unstated, with_checkpoints
from shardwright.api.shown import Shown, framed
from shardwright.config.base import PlanError, error_text
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, as_data, in_language, say
from shardwright.config.units import counted
from shardwright.train.launch import preemption
from shardwright.train.launch.ending import die_of_signals
from shardwright.train.launch.rank_environment import (
    SPEAKING_S,
    RankEnvironment,
    allowed_threads,
    rank_0_first,
    refused_by_rank_0,
)

if TYPE_CHECKING:
    from shardwright.parallel.comm.process_groups import Mesh
    from shardwright.train.launch.rank_life import Failure, Work
    from shardwright.train.run_lines import RunResult

Tell = Callable[[str], None]

# Fields of a TrainingResult that have the values of rank 0's RunResult.
_FIELDS_OF_RUN = (
    *("steps", "first_loss", "last_loss", "validation_loss", "unigram_loss", "validation_losses"),
    *("sample", "seconds", "preempted"),
)


@dataclass(frozen=True)
class StartOptions:
    """The options with which a run starts: `fresh` puts the checkpoints of its folder aside, and `weights_from` is the
    run whose weights it takes. `tell` prints further information, and `warn` prints problems on the way. `language` is
    that of the comparison of predicted with measured steps."""

    fresh: bool = False
    weights_from: str | None = None
    tell: Tell = print
    warn: Tell = field(default=partial(print, file=sys.stderr))
    language: str = ENGLISH


@dataclass(frozen=True, repr=False)
class TrainingResult(Shown):
    """A run that has ended: its losses in nats a token, its folder, and its steps compared with the prediction.
    `preempted` is True if it was asked to leave: it has saved, and the same call resumes it."""

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
    is_main_process: bool  # True on rank 0, or in the process that started the ranks: it prints the result
    preempted_by: int | None
    values: dict[str, Any]
    comparison_text: str = ""

    @property
    def text(self) -> str:
        held_out = "" if self.validation_loss is None else f", {self.validation_loss:.4f} on held-out text"
        losses = "nothing was left to do"
        if self.first_loss is not None and self.last_loss is not None:
            losses = f"loss from {self.first_loss:.4f} to {self.last_loss:.4f} nats a token{held_out}"
        ending = "; it was asked to leave, and goes on where it is" if self.preempted else ""
        summary = f"{self.name}: {counted(self.steps, 'step')} done in {self.seconds:.0f} s, {losses}{ending}"
        files = f"metrics in {self.folder}/metrics.jsonl and {self.folder}/tensorboard"
        return "\n".join(filter(None, (summary, files, self.comparison_text)))

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def _repr_html_(self) -> str:
        """The report of the run; without one what `to_dict` has."""
        from shardwright.config.run_file_names import REPORT

        try:
            return framed((self.folder / REPORT).read_text(encoding="utf-8"))
        except OSError:
            return super()._repr_html_()

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the run's metrics: one for each step and for each evaluation."""
        from shardwright.config.run_file_names import METRICS

        with (self.folder / METRICS).open(encoding="utf-8") as file:
            return [flat_keys(line) for line in map(json.loads, file) if "step" in line]


def train_job(spec: JobSpec, start: StartOptions = StartOptions()) -> TrainingResult:
    """Train a checked job: start the ranks of this machine, or be one rank that torchrun or Slurm has started. A run
    whose folder has a checkpoint resumes from it. Raises PlanError, RunError."""
    environment = RankEnvironment.from_environment()
    if environment is not None:
        die_of_signals()
        with refused_by_rank_0():
            spec = _for_its_world(spec, environment, start)
    spec = with_checkpoints(spec)
    if (environment is None or environment.rank == 0) and (cost := cost_text(spec)):
        start.tell(cost)
    hearing: AbstractContextManager[preemption.Preemption | None] = nullcontext(None)
    if environment is None:  # without checkpoints a signal ends the run as any command
        hearing = preemption.heard() if spec.checkpoint.is_on else preemption.unkept()
    is_main_process = environment is None or environment.rank == 0
    reported = ReportedRun(spec, start.warn)
    with hearing as request, reported.telling_of_failure():
        if environment is None:
            result, folder = _run_here(spec, request, start, reported)
        else:
            result, folder = _run_rank(spec, environment, start, reported)
        if spec.model.moe.experts and is_main_process:
            from shardwright.report.expert_use import draw_use

            start.tell(say("how experts were used: {file}", file=str(draw_use(folder, language=start.language))))
        compared, text = _compared(spec, result, folder, start.language) if is_main_process else (None, "")
        if report := reported.end("preempted" if result.preempted else "done"):
            report_line = in_language(say("report in {file}", file=str(report)), start.language)
            text = "\n".join(filter(None, (text, report_line)))
    return TrainingResult(
        name=spec.name,
        folder=folder,
        is_main_process=is_main_process,
        preempted_by=request.signal if request is not None else None,
        values=_run_values(result) | {"predicted_and_measured": compared},
        comparison_text=text,
        **{name: getattr(result, name) for name in _FIELDS_OF_RUN},
    )


def _run_values(result: "RunResult") -> dict[str, Any]:
    """The values of `train --json` that rank 0 knows. The actions it performed are drawn in the report alone."""
    values = asdict(replace(result, performed={}))
    del values["performed"]
    return values | {"validation_loss": result.validation_loss, "unigram_loss": result.unigram_loss}


def _compared(spec: JobSpec, result: Any, folder: Path, language: str) -> tuple[dict[str, Any] | None, str]:
    """The comparison of predicted with measured steps, which is added to the metrics; and the comparison as text, in a
    language."""
    if result.measured is None or result.preempted:  # a user who asks a run to leave does not wait long
        return None, ""
    from shardwright.config.run_file_names import METRICS
    from shardwright.report.run_comparison import compared_dict, compared_text
    from shardwright.train.launch.full_disk import telling_of_full_disk
    from shardwright.train.run_files import open_to_append

    comparison = compared_dict(spec, result.measured)
    metrics = folder / METRICS
    with telling_of_full_disk(metrics), open_to_append(metrics) as file:
        reason = as_data(comparison["time_not_predicted"])  # which a report shows in any language
        file.write(json.dumps({"predicted_and_measured": comparison, "time_not_predicted": reason}) + "\n")
    return comparison, compared_text(comparison, language)


def _run_here(
    spec: JobSpec, request: preemption.Preemption | None, start: StartOptions, reported: ReportedRun
) -> tuple[Any, Path]:
    """Launch all ranks on this machine. Returns the result of rank 0, and the run's folder."""
    from shardwright.train.launch.fork_server import start_server_early

    start_server_early(spec.run.device)
    from shardwright.measure.machine_memory import memory_faults
    from shardwright.train.checkpoint.kept import put_aside
    from shardwright.train.checkpoint.other_job import refuse_weights_from
    from shardwright.train.checkpoint.starting_weights import refuse_weights
    from shardwright.train.data.prepare import prepare_tokens, refuse_missing
    from shardwright.train.data.progress import tell_aside
    from shardwright.train.data.token_cache import remove_unfinished
    from shardwright.train.launch.run_folder import (
        folder_of,
        holding,
        holding_checkpoints,
        make_folder,
        removing_new_folders_on_error,
    )
    from shardwright.train.launch.this_machine import cluster_faults, machine_faults, on_this_machine

    folder, spec = folder_of(spec), on_this_machine(spec, spec.plan.world, start.warn)
    faults = cluster_faults(spec) or machine_faults(spec) or memory_faults(spec)
    with (
        removing_new_folders_on_error(folder),
        holding(folder, faults + make_folder(folder)),
        holding_checkpoints(spec, folder),  # before much text is read, as all checks that may refuse the run
    ):
        if start.weights_from is not None:
            refuse_weights_from(spec, start.weights_from)
        refuse_weights(spec, folder, is_anew=start.fresh)  # before the tokens, which can take an hour
        remove_unfinished(folder / "data")
        refuse_missing(spec.data, spec.model)
        prepare_tokens(spec.data, spec.model, spec.run.seed, folder / "data", tell=tell_aside)
        for line in put_aside(spec, folder) if start.fresh else ():
            start.tell(say("--fresh: {line}", line=line))
        reported.begin(folder)
        results = _launch_ranks(spec, request, start, folder)
        reported.keep_times({rank: row for result in results for rank, row in result.performed.items()})
        return results[0], folder


def _launch_ranks(spec: JobSpec, request: preemption.Preemption | None, start: StartOptions, folder: Path) -> list[Any]:
    """Launch the ranks; with `request` they are restarted after failures. Returns the results of all."""
    from shardwright.train.launch.launch import RankFailedError, launch
    from shardwright.train.launch.restarts import launch_with_restarts

    def tell(error: RankFailedError, restart: str) -> None:
        fault = say("failed: {reason}", reason=_advised(error_text(error), spec, error.failure))
        start.warn(say("{fault}\n{restart}", fault=fault, restart=restart))

    work = _work(spec, start.weights_from or "")
    try:
        if request is None:
            return launch(work, spec, folder)
        return launch_with_restarts(work, spec, folder, request, tell)
    except RankFailedError as error:
        raise RankFailedError(_advised(error_text(error), spec, error.failure), error.failure) from None


def _run_rank(
    spec: JobSpec, environment: RankEnvironment, start: StartOptions, reported: ReportedRun
) -> tuple[Any, Path]:
    """Be one rank. Returns its result, and the run's folder."""
    from shardwright.train.checkpoint.other_job import refuse_weights_from
    from shardwright.train.launch.run_folder import folder_of, removing_new_folders_on_error
    from shardwright.train.launch.this_machine import on_this_machine

    with refused_by_rank_0():
        if start.fresh:  # a restarted rank can't know whether the run has begun
            raise PlanError("train --fresh", [say("under torchrun a run begins anew in another run.folder; name one")])
    if start.weights_from is not None:
        with rank_0_first():
            refuse_weights_from(spec, start.weights_from)
    spec = on_this_machine(spec, 1, start.warn)  # each rank was given its device, if there are any
    folder = folder_of(spec)
    with removing_new_folders_on_error(folder) if environment.rank == 0 else nullcontext():
        return _run_rank_in(folder, spec, environment, start, reported), folder


def _run_rank_in(
    folder: Path, spec: JobSpec, environment: RankEnvironment, start: StartOptions, reported: ReportedRun
) -> Any:
    """Be one rank of a run that writes to `folder`. Returns its result."""
    from shardwright.train.data.token_cache import remove_unfinished
    from shardwright.train.launch.rank_life import run_rank
    from shardwright.train.launch.run_folder import holding, holding_checkpoints, make_folder, this_node

    folder_lock = holding(folder, make_folder(folder)) if environment.rank == 0 else nullcontext()
    checkpoint_lock = holding_checkpoints(spec, folder) if environment.rank == 0 else nullcontext()
    is_first_of_node, is_on = environment.local_rank == 0 < environment.rank, spec.checkpoint.is_on
    if is_first_of_node and (faults := make_folder(folder)):
        raise PlanError(this_node(), faults)
    work = _work(spec, start.weights_from or "")
    if is_first_of_node and is_on:
        work = partial(_work_in_a_shared_folder, work)
    leaves_early = preemption.leave_early(environment.rank)
    preemption_handling: AbstractContextManager[None] = nullcontext()
    if is_on:
        preemption_handling = preemption.heeded(
            before_first_step=leaves_early, hears_interrupts=True, tells=environment.rank == 0
        )
    with folder_lock, checkpoint_lock, preemption_handling:
        if environment.rank == 0:
            remove_unfinished(folder / "data")
            reported.begin(folder)
        return run_rank(environment, work, spec, folder, _teller(spec, environment, start), allowed_threads())


def _work_in_a_shared_folder(work: "Work", job: JobSpec, mesh: "Mesh", folder: Path) -> Any:
    """The work of the first rank of each further machine: its folder of checkpoints must be the folder of rank 0."""
    from shardwright.train.launch.run_folder import SHARED_S, shared_place, this_node, unshared_faults

    place = shared_place(job, folder)
    if place is not None and (faults := unshared_faults(place[0], min(SHARED_S, job.run.timeout_s / 2), place[1])):
        raise PlanError(this_node(), faults)
    return work(job, mesh, folder)


def _for_its_world(spec: JobSpec, environment: RankEnvironment, start: StartOptions) -> JobSpec:
    """The job under a plan for as many ranks as there are. Rank 0 reports which plan, or why there is none. Raises
    PlanError if a run on several machines leaves to defaults what such a run must state."""
    fitting, note = for_world(spec, environment.world)
    if note and environment.rank == 0:
        start.warn(note)
    refuse_unstated(fitting, -(-environment.world // environment.local_world))
    return fitting


def _work(spec: JobSpec, weights_from: str) -> "Work":
    """The work of each rank."""
    from shardwright.cost.failures import best_interval
    from shardwright.memory.job_memory import job_memory
    from shardwright.train.trainer import train as train_on_rank
    from shardwright.train.training_run import RunStart

    return partial(train_on_rank, start=RunStart(job_memory(spec), weights_from, best_interval(spec)))


def _teller(spec: JobSpec, environment: RankEnvironment, start: StartOptions) -> "Callable[[Failure], None]":
    """The function by which a rank of torchrun reports its failure."""
    from shardwright.sharding.mesh import MeshShape
    from shardwright.train.launch.rank_life import OF_ALL_RANKS
    from shardwright.train.launch.run_folder import this_node

    def tell(failure: "Failure") -> None:
        if environment.rank > 0 and failure.kind in OF_ALL_RANKS and failure.subject != this_node():
            time.sleep(SPEAKING_S)
        else:
            start.warn(_advised(failure.sentence(MeshShape.of(spec.plan)), spec, failure))

    return tell


def _advised(fault: str, spec: JobSpec, failure: "Failure | None") -> str:
    """The message of a failure, with a way out if there is one that it does not have."""
    if failure is None or failure.kind != "memory":
        return fault
    from shardwright.memory.first_fit import way_out

    return say("{fault}\n{way_out}", fault=fault, way_out=way_out(spec, failure.room_bytes))
