"""The commands that predict a job's steps and costs. They need torch only to measure."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.answer_pages import tell_answer
from shardwright.cli.checked_job import load_predicted, load_to_run
from shardwright.cli.command_language import command_language
from shardwright.cli.interchange import from_options, load_predicted_from
from shardwright.cli.job_options import (
    PredictCommand,
    TokenCount,
    asked_cluster,
    cluster_options,
    command_language_option,
    devices_option,
    file_option,
    job_options,
    json_option,
    language_option,
    memory_option,
    node_option,
    refuse_tokens,
)
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.cli.progress_bar import progress_shown
from shardwright.config.phrase import say
from shardwright.config.text_columns import fitting, logged

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec
    from shardwright.interchange.job_files import JobFiles


@click.command(
    cls=PredictCommand,
    brief=("--devices", "--device", "--set", "--as", "--tokens"),
    examples=(
        "estimate llama3-8b --devices 64 --device h100-sxm",
        "estimate quickstart --set plan.zero=1",
        "estimate llama3-405b-16k --as megatron-core",
    ),
)
@job_options
@cluster_options
@language_option
@from_options
@click.option(
    "--tokens",
    type=TokenCount(),
    default=0.0,
    help="Tokens of the run, such as 1e12 or 15T, in place of the job's steps.",
)
@click.option(
    "--beside", "with_others", is_flag=True, help="Also with all other software of the catalog, side by side."
)
def estimate(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    with_others: bool,
    language: str,
    tokens: float,
    **options: Any,
) -> None:
    """Say what memory each rank of JOB will hold, by kind, and whether it fits the cluster's device.

    And, where that device is known, how long a step takes and why, MFU, money, energy and time lost to failures.
    """
    refuse_tokens(tokens)
    spec, origin = _predicted_job(job, overrides, options | {"tokens": tokens}, as_json, language)
    from shardwright.api.estimated import estimated

    with progress_shown(command_language()):
        prediction = estimated(f"job {job}", spec, with_others=with_others, tokens=tokens, origin=origin)
    tell_answer(as_json, prediction.to_dict, lambda: fitting(prediction.in_language(language)))


@click.command(
    cls=PredictCommand,
    brief=("--devices", "--device", "--set", "--as", "--json"),
    examples=(
        "explain llama3-8b --devices 64 --device h100-sxm",
        "explain quickstart-moe --set cluster.device=h100-sxm",
    ),
)
@job_options
@cluster_options
@language_option
@from_options
def explain(job: str, overrides: tuple[str, ...], as_json: bool, language: str, **options: Any) -> None:
    """Tell one step of JOB: where the batch goes, what each device holds, what crosses which link, and how long."""
    spec, _ = _predicted_job(job, overrides, options, as_json, language)
    from shardwright.api.explained import Explained

    with progress_shown(command_language()):
        explained = Explained(spec)
        tell_answer(as_json, explained.to_dict, lambda: fitting(explained.in_language(language)))


def _predicted_job(
    job: str, overrides: tuple[str, ...], options: dict[str, Any], as_json: bool, language: str
) -> "tuple[JobSpec, JobFiles | None]":
    """The job to predict; with --from that of another system's files, and these. `options` are --from, --with, the
    cluster, and --tokens where the command has it."""
    system, further, tokens = options.pop("system_name"), options.pop("further_files"), options.pop("tokens", 0.0)
    cluster = asked_cluster(options)
    if further and not system:
        raise click.UsageError(say("--with names a further file of --from; say --from, too"))
    if system:
        return load_predicted_from(system, (job, *further), overrides, cluster, language)
    return load_predicted(job, overrides, cluster, as_json, tokens), None


_TABLE = click.Path(exists=True, path_type=Path)
_TABLE.name = "file"  # in messages: that it is no folder is told with a way out


@click.command(cls=LocalizedCommand)
@click.argument("runs", type=_TABLE)
@json_option
@language_option
@file_option("--out", help="Write each row's prediction, and where its time goes, as CSV.")
@file_option("--oom", help="Plans that ran out of memory.  [default: oom.csv beside RUNS]", exists=True)
@file_option("--fit", help="Fit the constants of the runs' device to them, and write it as a device's TOML file.")
def validate(runs: Path, as_json: bool, language: str, out: Path | None, oom: Path | None, fit: Path | None) -> None:
    """Predict every measured run in RUNS, a CSV file, and say how far off the predictions are.

    Columns are those of benchmarks/truth/README.md. Runs of your own need id, layers, hidden, seq, gpu, gpus,
    gpus_per_node, tp, pp, mbs, gbs, precision, and step_time_s or tokens_per_s_per_gpu; of a few each is shown. With
    --fit a part of the runs is held back in turn, and the file is written if that shows that the fitted constants
    predict better than the catalog's.
    """
    from shardwright.config.base import PlanError
    from shardwright.measure.validate import validate as compare
    from shardwright.report.validation_text import validation_text, write_rows

    if runs.is_dir():
        way_out = say("name a CSV file; `shardwright report {path}` sets a run beside its prediction", path=str(runs))
        raise PlanError(say("file {path}", path=str(runs)), [say("it is a folder; {way_out}", way_out=way_out)])
    oom_beside_runs = runs.parent / "oom.csv"
    oom = oom or (oom_beside_runs if oom_beside_runs.exists() and not oom_beside_runs.samefile(runs) else None)
    for table in filter(None, (runs, oom)):
        for option, file in (("--out", out), ("--fit", fit)):
            if file and file.exists() and file.samefile(table):
                fault = say(
                    "{option} {file} is a table that is read, and would be lost; name another file",
                    option=option,
                    file=file,
                )
                raise PlanError(say("output"), [fault])
    with progress_shown(command_language()):
        scores = compare(runs, oom)
    predictions = scores.pop("predictions")
    if out:
        write_rows(out, predictions)
    text = validation_text(scores, language, predictions)
    if fit:
        scores["cluster_fit"], fit_text = _fit_cluster(runs, fit, language)
        text += f"\n\n{fit_text}"
    tell_answer(as_json, lambda: scores, lambda: fitting(text))
    if not scores["predicted"] or (fit and not scores["cluster_fit"]["helps"]):
        sys.exit(1)


def _fit_cluster(runs: Path, file: Path, language: str) -> tuple[dict[str, Any], str]:
    """The constants of the device of a table's runs, written as a device's file if runs held back say that they help;
    and the words for it."""
    from shardwright.config.toml_text import toml_text
    from shardwright.measure.cluster_fit import fit_cluster
    from shardwright.measure.measured_runs.runs import read_runs
    from shardwright.report.output import write_output
    from shardwright.report.validation_text import cluster_fit_text

    with progress_shown(command_language()):
        fitted = fit_cluster(read_runs(runs))
    if fitted.helps:
        write_output(file, toml_text(fitted.entry()), "--fit")
    return fitted.to_dict(), cluster_fit_text(fitted.to_dict(), file, language)


@click.command(
    cls=PredictCommand,
    brief=("--rank", "--check", "--devices", "--device", "--set"),
    examples=(
        "dryrun quickstart",
        "dryrun llama3-405b-16k --rank 5000",
        "dryrun llama3-8b --devices 16 --device h100-sxm --check",
    ),
)
@job_options
@click.option("--rank", type=int, default=0, show_default=True, help="The rank to run.")
@devices_option
@click.option(
    "--device",
    default="",
    metavar="NAME|cpu|cuda",
    help="Device of the cluster, such as h100-sxm, in place of JOB's; or the kind of device that it runs as on, cpu or "
    "cuda: without it cuda where the cluster's device is a GPU.",
)
@node_option
@memory_option
@command_language_option
@click.option("--check", is_flag=True, help="Check, on all ranks, what a device would do: messages and kernels.")
def dryrun(
    job: str, overrides: tuple[str, ...], as_json: bool, rank: int, device: str, check: bool, **cluster_fields: Any
) -> None:
    """Run one rank of JOB as it is, but on tensors without memory and with nobody else there.

    Says what the rank holds at its peak, by kind and in which operator, and every collective that it takes part in: in
    seconds, on one CPU, for a plan of any size. With --check all ranks are run, as on CUDA: whether their messages come
    to an end under NCCL's rules, and whether kernels get what they demand.
    """
    kind = device.lower() if device.lower() in ("cpu", "cuda") else ""
    spec = load_to_run(job, overrides, asked_cluster(cluster_fields | {"device": "" if kind else device}))
    if check:
        from shardwright.config.base import PlanError

        if kind == "cpu" or rank:
            fault = say("--check runs all ranks as on CUDA; leave out --rank, and --device cpu")
            raise PlanError("dryrun --check", [fault])
        with progress_shown(command_language()):
            from shardwright.measure.checks.plan_checks import check_plan, checks_text  # load torch

            checks = check_plan(spec)
        text = logged(checks_text(spec.name, checks, command_language()))
        click.echo(json.dumps([result.as_dict() for result in checks]) if as_json else text)
        if any(result.faults for result in checks):
            raise SystemExit(1)
        return
    from shardwright.report.dryrun_text import dryrun_text

    with progress_shown(command_language()):
        from shardwright.measure.dryrun import dry_run  # loads torch, which takes seconds
        from shardwright.train.launch.loading import collect_as_usual

        collect_as_usual()  # the memory that cycles hold is measured, too
        run = dry_run(spec, rank, kind or ("cpu" if spec.runs_on_cpu else "cuda")).as_dict()
    tell_answer(as_json, lambda: run, lambda: fitting(dryrun_text(spec.name, run, command_language())))


COMMANDS = (dryrun, estimate, explain, validate)
