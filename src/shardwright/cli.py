"""The command line. Everything heavy is imported by the command that needs it: `--help` is there at once.

Exit status: 0 done, 1 it failed, 2 the input is wrong.
"""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright import __version__

if TYPE_CHECKING:
    from shardwright.spec.job import JobSpec

# What all ranks refuse, rank 0 says. torchrun ends them all when the first one leaves, so the others stay a while.
SPEAKING_S = 10.0


class _JobCommand(click.Command):
    """A command on a job: its help ends with every field of a job, its default and its meaning."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from shardwright.spec.fields import job_fields

        for section, rows in job_fields().items():
            with formatter.section(f"Fields of [{section}]" if section else "Fields of a job"):
                formatter.write_dl(rows)


def _job_options(command: Any) -> Any:
    json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    set_option = click.option(
        "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."
    )
    return click.argument("job")(set_option(json_option(command)))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__)
def cli() -> None:
    """Train large transformers with hybrid parallelism, and know beforehand what will happen.

    JOB is a TOML file or a catalog name such as quickstart.
    """


@cli.command(cls=_JobCommand)
@_job_options
def train(job: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train JOB. Starts the local ranks itself; under torchrun it is one of them."""
    spec = _load(job, overrides)
    from shardwright.measure.out_of_memory import way_out
    from shardwright.spec.mesh import MeshShape
    from shardwright.train.data import prepare_tokens
    from shardwright.train.launch import RunError, check_machine, launch
    from shardwright.train.rank import Failure, Seat, run_rank
    from shardwright.train.trainer import train as train_on_rank
    from shardwright.workload.memory import job_memory

    folder = Path(spec.run.folder or Path("runs", spec.name))
    seat = Seat.from_environment()

    work = partial(train_on_rank, predicted=job_memory(spec))

    def tell(failure: Failure) -> None:
        failure.leave(folder)
        if failure.kind != "input" or (seat is not None and seat.rank == 0):  # all ranks refuse the same input
            click.echo(failure.sentence(MeshShape.of(spec.plan)) + advice(failure), err=True)
        elif seat is not None:
            time.sleep(SPEAKING_S)

    def advice(failure: Failure | None) -> str:
        return "\n" + way_out(spec, failure.room_bytes) if failure is not None and failure.kind == "memory" else ""

    with _standard_output_for_json_alone(as_json):
        if seat is not None:
            result = run_rank(seat, work, spec, folder, tell)
        else:
            check_machine(spec, folder)  # before much text is read
            prepare_tokens(spec.data, spec.model, spec.run.seed, folder / "data")
            try:
                result = launch(work, spec, folder)[0]
            except RunError as error:
                raise RunError(f"{error}{advice(error.failure)}", error.failure) from None
        if spec.model.moe.experts and (seat is None or seat.rank == 0):
            from shardwright.report.experts import draw_use

            click.echo(f"how experts were used: {draw_use(folder)}")
    if as_json and (seat is None or seat.rank == 0):
        click.echo(json.dumps(result.as_dict()))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--svg", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Where to draw.  [default: experts.svg in the run's folder]",
)  # fmt: skip
def experts(run: Path, as_json: bool, svg: Path | None) -> None:
    """Draw how the experts of a run were used, from the folder RUN. The run may still go on."""
    from shardwright.report.experts import draw_use, read_use, use_dict, use_text

    file = draw_use(run, svg)
    use = read_use(run)
    click.echo(json.dumps(use_dict(use) | {"svg": str(file)}) if as_json else f"{use_text(use)}\ndrawn in {file}")


@cli.command(cls=_JobCommand)
@_job_options
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Optimizer steps to compare.")
@click.option("--tolerance", type=float, default=1e-5, show_default=True, help="Largest difference that passes.")
def verify(job: str, overrides: tuple[str, ...], as_json: bool, steps: int, tolerance: float) -> None:
    """Run JOB's plan and one rank on the same data, and print the largest differences."""
    spec = _load(job, overrides)
    from shardwright.measure.verify import verify as compare_with_one_rank

    verdict = compare_with_one_rank(spec, steps)
    passed = verdict.within(tolerance)
    if as_json:
        click.echo(json.dumps(verdict.as_dict()))
    else:
        click.echo(
            f"{verdict.world} ranks against one, {verdict.steps} steps of {spec.tokens_per_step:,} tokens:\n"
            f"  loss           differs by at most {verdict.max_loss_difference:.2e} nats a token\n"
            f"  gradient norm  differs by at most {verdict.max_grad_norm_relative_difference:.2e} of itself\n"
            f"  parameters     differ by at most {verdict.max_parameter_relative_difference:.2e} of their norm\n"
            f"  {'equal, bit for bit' if verdict.bitwise else 'equal' if passed else 'NOT equal'}"
            + ("" if verdict.bitwise else f" to a tolerance of {tolerance:g}")
        )
    if not passed:
        sys.exit(1)


@cli.command(cls=_JobCommand)
@_job_options
def estimate(job: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say what memory each rank of JOB will hold, by kind, and whether it fits the cluster's device."""
    spec = _load(job, overrides)
    from shardwright.report.estimate import show_estimate

    show_estimate(spec, as_json)


def _drawing_options(command: Any) -> Any:
    """Where a timeline goes."""
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option("--no-colour", is_flag=True, help="Letters instead of colours, as where there is no terminal."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
        click.option("--trace", type=file, metavar="FILE", help="Write a trace for Perfetto (ui.perfetto.dev)."),
        click.option("--svg", type=file, metavar="FILE", help="Write a picture."),
        click.option("--html", type=file, metavar="FILE", help="Write a page to zoom and pan; it needs no network."),
        click.option("--steps", type=int, default=1, show_default=True, help="Steps to draw, back to back."),
        click.option(
            "--communication", type=float, default=0.0, show_default=True,
            help="Time until a message is there; only its receiver waits.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command()
@click.argument("name", required=False)
@click.option("--compare", is_flag=True, help="All schedules that admit the shape, in one table; NAME may be left out.")
@click.option(
    "--stages", type=int, default=4, show_default=True,
    help="Pipeline ranks (devices), p in the papers; some schedules hold several pieces of the model on each.",
)  # fmt: skip
@click.option("--microbatches", type=int, default=8, show_default=True, help="Microbatches in one step, m.")
@click.option(
    "--virtual", type=int, default=None, metavar="V",
    help="Pieces of the model on each rank, for interleaved-1f1b and looped-bfs.  [default: 2 there, else 1]",
)  # fmt: skip
@click.option(
    "--forward", type=float, default=1.0, show_default=True,
    help="F: time of one microbatch through all layers of a rank; one of V pieces takes a V-th of it.",
)  # fmt: skip
@click.option("--input-grad", type=float, default=1.0, show_default=True, help="I: the same of the input gradients.")
@click.option("--weight-grad", type=float, default=1.0, show_default=True, help="W: the same of the weight gradients.")
@click.option(
    "--alive", type=float, default=0.0,
    help="auto: most microbatches whose activations a rank may keep.  [default: no limit]",
)  # fmt: skip
@click.option("--recompute", is_flag=True, help="Keep a stage's inputs alone, and run its forwards again (C).")
@click.option(
    "--gather", type=float, default=None, metavar="TIME",
    help="Shard the parameters: gather (G) a stage before it computes and release (L) it after. TIME is for all layers "
    "of a rank; reducing (R) their gradients takes as long.",
)  # fmt: skip
@_drawing_options
def schedule(
    name: str | None, compare: bool, stages: int, microbatches: int, virtual: int | None, forward: float,
    input_grad: float, weight_grad: float, alive: float, recompute: bool, gather: float | None, communication: float,
    steps: int, **output: Any,
) -> None:  # fmt: skip
    """Draw the pipeline schedule NAME, with its bubble, its memory and its messages.

    Times have no unit. What is drawn is the order that `train` would execute.
    """
    from shardwright.report.show import Output, Request, show_schedule
    from shardwright.simulate.bubbles import Work

    work = Work(forward, input_grad, weight_grad, latency=communication, gather=gather or 0.0)
    request = Request(
        stages, microbatches, virtual, steps, work, alive, "stage" if recompute else "none", gather
    )  # fmt: skip
    show_schedule(name, request, compare, Output(**output))


@cli.command(cls=_JobCommand)
@click.argument("job")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."
)
@click.option(
    "--execute", is_flag=True,
    help="Measure the stages on this machine, simulate with that, run some steps, and draw both.",
)  # fmt: skip
@_drawing_options
def simulate(
    job: str, overrides: tuple[str, ...], execute: bool, communication: float, steps: int, **output: Any
) -> None:
    """Draw the timeline of a step of JOB.

    Stages cost what their FLOPs say, relative to each other: 1 is the forward of one microbatch through the mean rank.
    """
    spec = _load(job, overrides)
    from shardwright.report.show import Executed, Output, show_executed, show_job

    if not execute:
        show_job(spec, communication, steps, Output(**output))
        return
    from shardwright.measure.step_time import compare_step_time

    with tempfile.TemporaryDirectory(prefix="shardwright-simulate-") as folder:
        found = compare_step_time(spec, Path(folder))
    show_executed(spec, Executed(found.costs, found.executed(), found.executed_s), Output(**output))


@cli.command()
@click.argument("runs", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write each row's prediction, and where its time goes, as CSV.",
)  # fmt: skip
@click.option(
    "--oom", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Plans that ran out of memory.  [default: oom.csv beside RUNS]",
)  # fmt: skip
@click.option(
    "--left-out", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Constants fitted without each family.  [default: left_out.toml beside RUNS]",
)  # fmt: skip
def validate(runs: Path, as_json: bool, out: Path | None, oom: Path | None, left_out: Path | None) -> None:
    """Predict every measured run in RUNS, a CSV file, and say how far off the predictions are.

    Columns are those of benchmarks/truth/README.md.
    """
    import tomllib

    from shardwright.measure.validate import validate as compare
    from shardwright.report.validation import validation_text, write_rows
    from shardwright.spec.base import PlanError

    beside = runs.parent / "oom.csv"
    oom = oom or (beside if beside.exists() and beside != runs else None)
    left_out = left_out or runs.parent / "left_out.toml"
    folds = tomllib.loads(left_out.read_text(encoding="utf-8")) if left_out.exists() else {}
    try:
        found = compare(runs, oom, folds)
    except ValueError as error:
        raise PlanError(f"file {runs}", [str(error)]) from None
    lines = found.pop("predictions")
    if out:
        write_rows(out, lines)
    click.echo(json.dumps(found) if as_json else validation_text(found))


def _load(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    from shardwright.schedule.job import plan_faults
    from shardwright.spec.base import PlanError
    from shardwright.spec.load import load_job
    from shardwright.workload.recompute import meet_budget

    spec = load_job(job, list(overrides))
    if faults := plan_faults(spec):
        raise PlanError(f"job {job}", faults)
    return meet_budget(spec)


class _standard_output_for_json_alone:  # noqa: N801 (reads as a verb in its with statement)
    """While it lasts, what ranks print goes to standard error."""

    def __init__(self, active: bool) -> None:
        self._active = active
        self._saved = -1

    def __enter__(self) -> None:
        if self._active:
            import os

            sys.stdout.flush()
            self._saved = os.dup(1)
            os.dup2(2, 1)

    def __exit__(self, *_: object) -> None:
        if self._active:
            import os

            sys.stdout.flush()
            os.dup2(self._saved, 1)
            os.close(self._saved)


def main() -> None:
    """Entry point: every error the user can mend is one message and no traceback."""
    try:
        cli()
    except ValueError as error:
        from shardwright.spec.base import PlanError  # not before: it takes pydantic, and --help does not

        if not isinstance(error, PlanError):
            raise
        click.echo(str(error), err=True)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__name__ != "RunError":
            raise
        click.echo(f"failed: {error}", err=True)
        sys.exit(1)
