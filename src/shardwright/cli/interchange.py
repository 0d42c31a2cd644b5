"""The commands that import jobs from other training systems, and export jobs to them."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.checked_job import tell_notes
from shardwright.cli.command_language import command_language
from shardwright.cli.job_options import (
    JobCommand,
    PredictCommand,
    asked_cluster,
    cluster_options,
    job_file_option,
    job_options,
    json_option,
    language_option,
    set_option,
)
from shardwright.cli.progress_bar import search_shown
from shardwright.cli.system_option import ListedSystemOption, SystemOption
from shardwright.config.phrase import in_language, say

if TYPE_CHECKING:
    from shardwright.api.asked_job import JobToPlan
    from shardwright.config.asked_cluster import AskedCluster
    from shardwright.config.job import JobSpec
    from shardwright.interchange.imported import Imported
    from shardwright.interchange.job_files import JobFiles
    from shardwright.interchange.system import System
    from shardwright.planner.advice.advice import Advice


class ImportCommand(PredictCommand):
    """A command on files of another system. Words behind `--` are the arguments of the first script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments, with each word behind `--` as an option of its own."""
        place = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*args[:place], *(f"--argument={word}" for word in args[place + 1 :])])


@click.command(
    name="import",
    cls=ImportCommand,
    brief=("--set", "--devices", "--device", "--toml", "--json"),
    examples=("import megatron docs/pretrain.sh --device a100-sxm-80g",),
)
@click.argument("words", nargs=-1, required=True, metavar="[SYSTEM] FILES...")
@set_option
@cluster_options
@click.option("--argument", "arguments", multiple=True, hidden=True)
@click.option("--from", "system_name", cls=SystemOption, is_written=False, help="SYSTEM, for who writes it as in plan.")
@job_file_option(help="Write the job there.  [default: to standard output]")
@language_option
@json_option
def import_job(
    words: tuple[str, ...],
    overrides: tuple[str, ...],
    arguments: tuple[str, ...],
    toml: Path | None,
    language: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a job of FILES of another training system: a launch script of Megatron-LM, the configuration of another.

    SYSTEM is recognised from the first file if it is not named; an unknown one lists all.
    Arguments of the first script stand behind them: import megatron run.sh inner.sh -- 7B 4. Nothing of the files is
    run. Variables that they leave to the environment are asked for (--set NAME=VALUE); notes on standard error tell
    what was assumed, what a job can't say and what is not known.
    """
    from dataclasses import replace

    from shardwright.api.asked_job import planned
    from shardwright.api.imported_job import imported_job, system_and_files
    from shardwright.interchange.carried_data import with_paths_from
    from shardwright.report.imported_text import imported_dict, imported_notes
    from shardwright.report.toml_files import job_toml, write_toml

    named = options.pop("system_name")
    system, files = system_and_files(words, named or "")
    imported = imported_job(system, files, overrides, asked_cluster(options), arguments)
    planned(say("job {name}", name=imported.job.name), imported.job)
    imported = replace(imported, job=with_paths_from(imported.job, toml.parent if toml else Path()))
    if toml:
        write_toml(toml, imported.job)
    if as_json:
        click.echo(json.dumps(imported_dict(imported)))
    elif toml is None:
        click.echo(job_toml(imported.job), nl=False)
    if not as_json:
        click.echo(imported_notes(imported, language=language), err=True)


@click.command(
    name="export",
    cls=JobCommand,
    brief=("--to", "--out", "--devices", "--device", "--set"),
    examples=(
        "export llama3-405b-8k --to torchtitan",
        "export quickstart --to megatron --out scripts",
        "export qwen3-0.6b --devices 4 --device h100-sxm --to megatron",
    ),
)
@job_options
@cluster_options
@click.option("--to", "system", cls=ListedSystemOption, is_written=True, required=True, help="The training system.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the files there.  [default: to standard output]",
)
@language_option
def export_job(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    system: str,
    out: Path | None,
    language: str,
    **cluster_fields: Any,
) -> None:
    """Write JOB's plan in the language of another training system; weights are exported by `checkpoint export`.

    A plan that the system does not have is refused, with all that it lacks and the nearest plan that it has. JOB may be
    a model, with --devices and --device: then the plan is the best one that the system has, as of `plan --for`.
    """
    from shardwright.api.exported_job import exported_job
    from shardwright.interchange.system import SYSTEMS

    target = SYSTEMS[system]
    result = exported_job(target, job_to_export(target, job, overrides, asked_cluster(cluster_fields)))
    if out:
        written = [say("wrote {file}", file=str(file)) for file in result.save(out, "--out")]
        click.echo("\n".join(in_language(line, language) for line in written), err=True)
    elif not as_json:
        click.echo(result.text, nl=False)
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    elif notes := result.notes(language):
        click.echo(notes, err=True)


def job_to_export(target: "System", job: str, overrides: tuple[str, ...], cluster: "AskedCluster") -> "JobSpec":
    """The job under its own plan; a model, or half a plan, under the best plan that a system has. Notes go to standard
    error. Raises PlanError."""
    from shardwright.api.asked_job import AskedJob
    from shardwright.api.plans_of_system import job_of_system

    asked_job = AskedJob(job, overrides, cluster)
    with search_shown(command_language()) if asked_job.needs_plan else nullcontext():
        spec, notes = job_of_system(target, asked_job)
    tell_notes(notes, aside=True)
    return spec


def from_options(command: Any) -> Any:
    """Add `--from` and `--with`: JOB is a file of another system."""
    return click.option(
        "--from",
        "system_name",
        cls=SystemOption,
        is_written=False,
        help="JOB is a launch script or configuration of this training system, as in plan and import.",
    )(
        click.option(
            "--with", "further_files", multiple=True, metavar="FILE", help="--from: a further file; may be repeated."
        )(command)
    )


def load_predicted_from(
    name: str, files: tuple[str, ...], sets: tuple[str, ...], cluster: "AskedCluster", language: str
) -> "tuple[JobSpec, JobFiles | None]":
    """A job of another system under its own plan, to predict it, and its files. Notes on the import, in a language, go
    to standard error. Raises PlanError."""
    from shardwright.api.asked_job import planned
    from shardwright.api.imported_job import imported_job
    from shardwright.interchange.job_files import origin_of
    from shardwright.report.imported_text import imported_notes

    imported = imported_job(name, files, sets, cluster)
    spec = planned(say("job {name}", name=imported.job.name), imported.job)
    click.echo(imported_notes(imported, with_data=False, language=language) + "\n", err=True)
    return spec, origin_of(name, files, imported)


def load_from(
    name: str, files: tuple[str, ...], sets: tuple[str, ...], cluster: "AskedCluster", language: str
) -> "tuple[JobToPlan, Imported, JobFiles | None]":
    """A job of another system to find better plans for, its import, and its files, if that system's are written, too.
    Notes on the import, in a language, go to standard error."""
    from dataclasses import replace

    from shardwright.api.asked_job import with_own_plan
    from shardwright.api.imported_job import imported_job
    from shardwright.config.base import PlanError
    from shardwright.interchange.job_files import origin_of
    from shardwright.interchange.system import SOURCES
    from shardwright.report.imported_text import imported_notes

    imported = imported_job(name, files, sets, cluster)
    job = imported.job
    if job.cluster.device == "unknown":
        fault = say("nothing says what devices it runs on; say it with --device, such as h100-sxm")
        raise PlanError(f"{name} {files[0]}", [fault])
    click.echo(imported_notes(imported, with_data=False, language=language) + "\n", err=True)
    to_plan, origin = with_own_plan(job), origin_of(name, files, imported)
    if origin is None:
        note = say(
            "files of {system} are read and not written, so plans are told as fields of a job: set them in its files "
            "by its own names",
            system=SOURCES[name].title,
        )
        to_plan = replace(to_plan, notes=(*to_plan.notes, note))
    return to_plan, imported, origin


def changes(
    origin: "JobFiles", own_job: "JobSpec", advice: "Advice", imported: "Imported", language: str | None
) -> "str | dict[str, Any]":
    """The changes of settings that make the imported job faster, as text in a language; as data for JSON if it is
    None."""
    from shardwright.cost.calibration import shipped
    from shardwright.planner.advice.priced_plan import priced
    from shardwright.report.flag_changes import changes_dict, changes_text, faster_plans

    (own_plan,) = priced([own_job], shipped())
    faster = faster_plans(origin, own_plan, advice, imported.sources)
    if language is None:
        return changes_dict(own_plan, faster)
    first = advice.recommendation.plan.job if advice.recommendation else None
    is_lacking = first is not None and not origin.has(first)
    return changes_text(origin, own_plan, faster, language, is_lacking=is_lacking)
