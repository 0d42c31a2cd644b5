"""The commands that import jobs from other training systems, and export jobs to them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.checked_job import load, tell_notes
from shardwright.cli.command_language import command_language
from shardwright.cli.job_options import (
    JobCommand,
    PredictCommand,
    asked_cluster,
    cluster_options,
    file_option,
    job_options,
    json_option,
    language_option,
    set_option,
)
from shardwright.cli.progress_bar import search_shown
from shardwright.cli.system_option import ListedSystemOption, SystemOption
from shardwright.config.phrase import in_language, say
from shardwright.config.user_file import system_reason

if TYPE_CHECKING:
    from shardwright.api.asked_job import JobToPlan
    from shardwright.config.asked_cluster import AskedCluster
    from shardwright.config.job import JobSpec
    from shardwright.interchange.imported import Imported
    from shardwright.interchange.job_files import JobFiles
    from shardwright.interchange.system import System
    from shardwright.planner.advice.advice import Advice
    from shardwright.planner.advice.objections import Objection
    from shardwright.planner.search.constraints import Constraints


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
@file_option("--toml", help="Write the job there.  [default: to standard output]")
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
    from shardwright.config.base import PlanError
    from shardwright.interchange.exported import Lacking, exported
    from shardwright.interchange.system import SYSTEMS
    from shardwright.report.imported_text import exported_notes, nearest_export
    from shardwright.report.output import write_output

    target = SYSTEMS[system]
    spec = job_to_export(target, job, overrides, asked_cluster(cluster_fields))
    try:
        result = exported(target, spec)
    except Lacking as error:
        raise PlanError(error.subject, error.faults, nearest_export(target, spec, error)) from None
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = say(
                "--out {folder} can't be made: {reason}; name another folder",
                folder=str(out),
                reason=system_reason(error),
            )
            raise PlanError(say("output"), [fault]) from None
        for name, text in result.files.items():
            write_output(out / name, text, "--out")
        written = [say("wrote {file}", file=str(out / name)) for name in result.files]
        click.echo("\n".join(in_language(line, language) for line in written), err=True)
    elif not as_json:
        for name, text in result.files.items():
            click.echo((f"# ---- {name}\n" if len(result.files) > 1 else "") + text, nl=False)
    if as_json:
        left_out, rate = list(result.left_out), result.unsaid_learning_rate
        click.echo(json.dumps({"files": result.files, "left_out": left_out, "unsaid_learning_rate": rate}))
    elif notes := exported_notes(result, target, language):
        click.echo(notes, err=True)


def job_to_export(target: "System", job: str, overrides: tuple[str, ...], cluster: "AskedCluster") -> "JobSpec":
    """The job under its own plan; a model, or half a plan, under the best plan that a system has. Raises PlanError."""
    from functools import partial

    from shardwright.api.asked_job import AskedJob
    from shardwright.api.found_plans import PlanQuestion, found_plans
    from shardwright.config.base import PlanError
    from shardwright.report.plans_text import plan_words

    asked_job = AskedJob(job, overrides, cluster)
    if not asked_job.needs_plan:
        return load(job, overrides, cluster)
    own_notes = asked_job.notes
    _, to_plan = planned_for(target.name, asked_job.to_plan())
    restrict = partial(held_to, target, to_plan.job.cluster.software)
    with search_shown(command_language()):
        plans = found_plans(
            asked_job.subject, to_plan, PlanQuestion(), restrict, objection=partial(export_objection, target)
        )
    if plans.best is None:
        fault = say(
            "no plan that {system} has fits on {cluster}; use more --devices",
            system=target.title,
            cluster=f"{to_plan.job.cluster.num_devices:,} {to_plan.job.cluster.device}",
        )
        raise PlanError(asked_job.subject, [fault])
    chosen = say(
        "the plan is what `plan --for {name}` recommends: {plan}; set plan.tp and others for your own",
        name=target.name,
        plan=plan_words(plans.best.plan),
    )
    tell_notes((*own_notes, chosen), aside=True)
    return plans.best


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
    is_lacking = first is not None and export_objection(origin.system, first) is not None
    return changes_text(origin, own_plan, faster, language, is_lacking=is_lacking)


def planned_for(name: str, to_plan: "JobToPlan") -> "tuple[System, JobToPlan]":
    """A system, and the job as its software unless it names other software than this runtime, with a note on
    exporting."""
    from dataclasses import replace

    from shardwright.config.software import software_of
    from shardwright.interchange.system import SYSTEMS

    system = SYSTEMS[name]

    def of_system(job: "JobSpec") -> "JobSpec":
        if not software_of(job.cluster.software).is_own:
            return job
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": system.software})})

    own_job = to_plan.own_job and of_system(to_plan.own_job)
    noted = _with_export_note(system, to_plan)
    return system, replace(noted, job=of_system(to_plan.job), own_job=own_job)


def _with_export_note(system: "System", to_plan: "JobToPlan") -> "JobToPlan":
    """The job with a note on how a plan of a system is written."""
    from dataclasses import replace

    note = say(
        "every plan is one that {title} has: write it with --toml FILE, and `shardwright export FILE --to {name}` "
        "writes its files",
        title=system.title,
        name=system.name,
    )
    return replace(to_plan, notes=(*to_plan.notes, note))


def kept_to(
    name: str | None, system: "System | None", to_plan: "JobToPlan"
) -> "tuple[System | None, JobToPlan, Callable[[JobSpec], Objection | None] | None]":
    """The system to whose plans a search is held, the job for it, and the objection to plans that it does not have: the
    system of a name, or else that of the job's own files, unless that has not what the job trains, whatever its plan
    is. All are as given and None where neither is there."""
    if name:
        named, to_plan = planned_for(name, to_plan)
        return named, to_plan, partial(export_objection, named)
    own = export_objection(system, to_plan.own_job) if system and to_plan.own_job else None
    if system is None or (own and not own.fields):
        return system, to_plan, None
    return system, _with_export_note(system, to_plan), partial(export_objection, system)


def export_objection(system: "System", job: "JobSpec") -> "Objection | None":
    """The first reason why a system does not have a job as it is, with the fields at fault; None if it has."""
    from shardwright.interchange.exported import Lacking, exported
    from shardwright.planner.advice.objections import Objection

    try:
        exported(system, job)
    except Lacking as error:
        names = [name.removeprefix("plan.") for name in error.fields if name.startswith("plan.")]
        return Objection(error.faults[0], {name: getattr(job.plan, name) for name in names})
    return None


def held_to(system: "System", software: str, constraints: "Constraints") -> "Constraints":
    """The constraints, reduced to values that the system supports, and the generation of it that prices the job."""
    from dataclasses import replace

    return replace(constraints, among={**constraints.among, **system.has(software)})
