"""The commands that draw: a pipeline schedule by itself, and the timeline of a job."""

from typing import Any

import click

from shardwright.cli.checked_job import load_predicted, load_to_run
from shardwright.cli.cluster_option_names import CLUSTER_OPTIONS
from shardwright.cli.job_options import (
    BriefCommand,
    PredictCommand,
    asked_cluster,
    cluster_options,
    expect_many_actions,
    file_option,
    json_option,
    language_option,
    question_of,
    set_option,
)
from shardwright.config.phrase import say


def _drawing_options(command: Any) -> Any:
    """Options for the output of a timeline, and for its steps and messages."""
    for option in (
        click.option("--no-colour", is_flag=True, help="Letters instead of colours, as where there is no terminal."),
        json_option,
        language_option,
        file_option("--trace", help="Write a trace for Perfetto (ui.perfetto.dev)."),
        file_option("--svg", help="Write a picture."),
        file_option("--html", help="Write a page to zoom and pan; it needs no network."),
        click.option(
            "--steps", "num_steps", type=int, default=1, show_default=True, help="Steps to draw, back to back."
        ),
        click.option(
            "--communication",
            "latency",
            type=float,
            default=0.0,
            show_default=True,
            help="Time until a message is there; only its receiver waits.",
        ),
    ):
        command = option(command)
    return command


@click.command(
    cls=BriefCommand,
    brief=("--stages", "--microbatches", "--virtual", "--compare", "--html"),
    examples=("schedule zb-h2 --stages 4 --microbatches 8", "schedule --compare --stages 8 --microbatches 32"),
)
@click.argument("name", required=False)
@click.option("--compare", is_flag=True, help="All schedules that admit the shape, in one table; NAME may be left out.")
@click.option(
    "--stages",
    "num_ranks",
    type=int,
    default=4,
    show_default=True,
    help="Pipeline ranks (devices), p in the papers; some schedules hold several pieces of the model on each.",
)
@click.option(
    "--microbatches", "num_microbatches", type=int, default=8, show_default=True, help="Microbatches in one step, m."
)
@click.option(
    "--virtual",
    "virtual_stages",
    type=int,
    default=None,
    metavar="V",
    help="Pieces of the model on each rank, for interleaved-1f1b and looped-bfs.  [default: 2 there, else 1]",
)
@click.option(
    "--forward",
    type=float,
    default=1.0,
    show_default=True,
    help="F: time of one microbatch through all layers of a rank; one of V pieces takes a V-th of it.",
)
@click.option("--input-grad", type=float, default=1.0, show_default=True, help="I: the same of the input gradients.")
@click.option("--weight-grad", type=float, default=1.0, show_default=True, help="W: the same of the weight gradients.")
@click.option(
    "--alive",
    "most_alive",
    type=float,
    default=0.0,
    help="auto: most microbatches whose activations a rank may keep.  [default: no limit]",
)
@click.option("--recompute", is_flag=True, help="Keep a stage's inputs alone, and run its forwards again (C).")
@click.option(
    "--gather",
    type=float,
    default=None,
    metavar="TIME",
    help="Shard the parameters: gather (G) a stage before it computes and release (L) it after. TIME is for all layers "
    "of a rank; reducing (R) their gradients takes as long.",
)
@click.option(
    "--slow",
    type=(int, float),
    default=None,
    metavar="RANK TIMES",
    help="A rank whose computations take TIMES as long as the others', such as --slow 2 1.5; the order stays.",
)
@_drawing_options
def schedule(name: str | None, compare: bool, **options: Any) -> None:
    """Draw the pipeline schedule NAME, with its bubble, its memory and its messages.

    Times have no unit. The picture has the order that `train` would execute.
    """
    expect_many_actions()
    from shardwright.report.timeline.schedule_command import Output, Request, show_schedule

    show_schedule(name, question_of(Request, options), compare, Output(**options))


@click.command(
    cls=PredictCommand,
    brief=("--devices", "--device", "--set", "--html", "--json"),
    examples=("simulate docs/job.toml --html timeline.html", "simulate llama3-8b --devices 16 --device h100-sxm"),
)
@click.argument("job")
@set_option
@cluster_options
@click.option(
    "--execute",
    is_flag=True,
    help="Measure the stages on this machine, simulate with that, run some steps, and draw both.",
)
@_drawing_options
def simulate(
    job: str,
    overrides: tuple[str, ...],
    execute: bool,
    latency: float,
    num_steps: int,
    **options: Any,
) -> None:
    """Draw the timeline of a step of JOB.

    Times are seconds where the cluster's device has a calibration. Elsewhere, and with --communication, stages cost
    what their FLOPs say, relative to each other: 1 is the forward of one microbatch through the mean rank.
    """
    cluster = asked_cluster({name: options.pop(name) for name in CLUSTER_OPTIONS})
    if execute and cluster != asked_cluster({}):
        raise click.UsageError(
            say("--execute runs on this machine; leave --devices, --device, --devices-per-node and --memory-gib out")
        )
    spec = load_to_run(job, overrides) if execute else load_predicted(job, overrides, cluster, options["as_json"])
    from shardwright.report.timeline.job_study import study_job
    from shardwright.report.timeline.schedule_command import Output, show_job

    if execute:
        from shardwright.api.executing import run_and_study

        study = run_and_study(spec)
    else:
        expect_many_actions()
        study = study_job(spec, latency, num_steps)
    show_job(study, Output(**options))


COMMANDS = (schedule, simulate)
