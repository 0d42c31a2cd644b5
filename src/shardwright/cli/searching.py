"""The commands that search: the best plan of a job, its layout over stages, and both at each size of its cluster."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.answer_pages import tell_answer
from shardwright.cli.checked_job import load_predicted, load_to_plan, tell_notes
from shardwright.cli.cluster_option_names import CLUSTER_OPTIONS
from shardwright.cli.command_language import command_language
from shardwright.cli.interchange import changes, load_from
from shardwright.cli.job_options import (
    PredictCommand,
    TokenCount,
    asked_cluster,
    cluster_options,
    device_options,
    expect_many_actions,
    file_option,
    has_colours,
    job_file_option,
    job_options,
    language_option,
    memory_option,
    question_of,
    refuse_tokens,
)
from shardwright.cli.progress_bar import progress_shown, search_shown
from shardwright.cli.system_option import SystemOption
from shardwright.config import largest
from shardwright.config.phrase import in_language, say
from shardwright.config.text_columns import fitting

if TYPE_CHECKING:
    from shardwright.api.asked_job import JobToPlan


def _search_options(command: Any) -> Any:
    """Add the options that constrain the search for plans."""
    between_help = "A range for a degree, plan.microbatch_size or batch.global_batch_size; may be repeated."
    command = click.option("--between", multiple=True, metavar="FIELD=LOW,HIGH", help=between_help)(command)
    keep_help = "A field of the plan that stays; may be repeated."
    return click.option("--keep", multiple=True, metavar="plan.FIELD=VALUE", help=keep_help)(command)


@click.command(
    cls=PredictCommand,
    brief=("--devices", "--device", "--search", "--keep", "--toml"),
    examples=(
        "layout gemma2-27b-tpu",
        "layout llama3-405b-16k --toml uneven.toml",
        "layout gemma2-27b --devices 64 --device h100-sxm",
    ),
)
@job_options
@cluster_options
@click.option(
    "--search",
    is_flag=True,
    help="Choose the rest of the plan too, with 1F1B: for clusters of parts, as plan does it for those of one kind.",
)
@_search_options
@language_option
@job_file_option(help="Write the job with the layout, for train and the other commands.")
def layout(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    search: bool,
    toml: Path | None,
    language: str,
    **options: Any,
) -> None:
    """Find how many layers each stage of JOB's plan should hold, and in which order a cluster's parts should stand.

    The result is plan.layout, which `train` runs. Stages on slower devices get fewer layers. JOB may be a model, with
    --devices and --device: then of its best plan.
    """
    from shardwright.config.base import PlanError, error_text, together
    from shardwright.cost.calibration import shipped
    from shardwright.planner.search.constraints import constraints_of
    from shardwright.planner.stages.best_layout import best_layout
    from shardwright.planner.stages.mixed_devices import best_mixed
    from shardwright.report.layout_text import layout_dict, layout_text
    from shardwright.report.toml_files import write_toml

    cluster = asked_cluster({name: options.pop(name) for name in CLUSTER_OPTIONS})
    try:
        if search:
            load = partial(load_to_plan, job, overrides, cluster)
            constraints, to_plan = together(say("job {name}", name=job), partial(constraints_of, **options), load)
            with progress_shown(command_language()):
                laid_out = best_mixed(to_plan.job, constraints, shipped())
        else:
            laid_out = best_layout(load_predicted(job, overrides, cluster, as_json), shipped())
    except KeyError as error:
        raise PlanError(say("job {name}", name=job), [error_text(error)]) from None
    if toml:
        write_toml(toml, laid_out.job)
    tell_answer(as_json, lambda: layout_dict(laid_out), lambda: fitting(layout_text(laid_out, language)))
    if toml:
        click.echo(in_language(say("the job with the layout is in {file}", file=str(toml)), language), err=True)


@click.command(
    cls=PredictCommand,
    brief=("--devices", "--device", "--keep", "--for", "--toml"),
    examples=(
        "plan llama3-8b --devices 64 --device h100-sxm",
        "plan llama3-405b-16k --keep plan.tp=8 --toml chosen.toml",
        "plan --from megatron docs/pretrain.sh --device a100-sxm-80g",
    ),
)
@job_options
@cluster_options
@language_option
@click.option("--top", type=click.IntRange(1, largest.SHOWN_PLANS), default=5, show_default=True, help="Plans to show.")
@click.option("--details", is_flag=True, help="Also the search, every reason, and what would change the answer.")
@_search_options
@click.option(
    "--float8",
    metavar="NAME",
    default="none",
    show_default=True,
    help="A recipe of precision.float8 that the search may choose beside the job's own.",
)
@click.option(
    "--objective",
    type=click.Choice(["time", "goodput", "cost", "energy", "devices", "memory"]),
    default="time",
    show_default=True,
    help="time: the fastest step; goodput: the fewest days with failures, restarts and checkpoints in them, and cost, "
    "energy: the fewest dollars or kWh by token, all on some of the nodes; devices: the fewest nodes for a deadline; "
    "memory: the most room in plans at most 5 % slower than the fastest.",
)
@click.option(
    "--as-software",
    is_flag=True,
    help="Leave out what the job's software (cluster.software) does not have. Without it such plans are marked.",
)
@click.option(
    "--tokens",
    type=TokenCount(),
    default=0.0,
    help="Tokens of the run whose days and money are told, such as 1e12 or 15T.  [default: 1e12]",
)
@click.option("--days", type=float, default=0.0, help="Days within which --tokens have to be trained on.")
@click.option(
    "--from",
    "system_name",
    cls=SystemOption,
    is_written=False,
    help="JOB is a launch script or configuration of this training system; says which of its settings to change.",
)
@click.option(
    "--for",
    "target_name",
    cls=SystemOption,
    is_written=True,
    help="Plans that this training system has and `export` writes as they are, priced as its software.",
)
@click.option("--with", "further_files", multiple=True, metavar="FILE", help="--from: a further file; may be repeated.")
@job_file_option(help="Write the job with the recommended plan, for train and the other commands.")
def plan(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    system_name: str | None,
    further_files: tuple[str, ...],
    toml: Path | None,
    **options: Any,
) -> None:
    """Find the best plan for JOB's model, batch and cluster, and say why it is.

    JOB may be a model too, with --devices and --device. Every legal plan is considered; the one that is predicted to be
    the fastest is recommended. JOB's own plan, if it has one, is compared with what is found.
    """
    from shardwright.api.found_plans import PlanQuestion, found_plans
    from shardwright.api.plans_of_system import held_to, kept_to
    from shardwright.config.base import together
    from shardwright.interchange.carried_data import with_paths_from
    from shardwright.report.toml_files import write_toml

    expect_many_actions()
    details, target_name, language = (options.pop(name) for name in ("details", "target_name", "language"))
    question, cluster = question_of(PlanQuestion, options), asked_cluster(options)
    subject = say("job {name}", name=job)
    imported = origin = None
    if system_name:
        read = partial(load_from, system_name, (job, *further_files), overrides, cluster, language)
        _, (to_plan, imported, origin) = together(subject, question.constraints, read)
    else:
        load = partial(load_to_plan, job, overrides, cluster, as_json, run_tokens=question.tokens)
        _, to_plan = together(subject, question.constraints, load)
    target, to_plan, objection = kept_to(target_name, origin and origin.system, to_plan)
    restrict = partial(held_to, target, to_plan.job.cluster.software) if target else None
    with search_shown(command_language()):
        plans = found_plans(subject, to_plan, question, restrict, objection)
        advice = plans.advice if as_json else plans.explained
    own_changes: str | dict[str, Any] = ""
    if origin and imported and to_plan.own_job and not to_plan.own_faults:
        own_changes = changes(origin, to_plan.own_job, advice, imported, None if as_json else language)
    if toml and plans.best is not None:
        write_toml(toml, with_paths_from(plans.best, toml.parent) if system_name else plans.best)

    def values() -> Any:
        rows = plans.dicts()
        return {"as_given": own_changes or None, "plans": rows} if system_name else rows

    def text() -> str:
        given = "" if as_json else fitting(str(own_changes))
        return "\n\n".join(filter(None, (given, plans.screen(details, has_colours(), language))))

    tell_answer(as_json, values, text)
    if plans.best is None:
        sys.exit(1)
    if toml:
        written = say("the job with the recommended plan is in {file}", file=str(toml))
        click.echo(in_language(written, language), err=True)


@click.command(
    cls=PredictCommand,
    brief=("--devices", "--device", "--keep", "--tokens", "--json"),
    examples=(
        "scale llama3-8b --devices 8-256 --device h100-sxm",
        "scale gpt3-175b-1024 --devices 512,1024 --keep plan.tp=8",
    ),
)
@job_options
@click.option(
    "--devices",
    "--gpus",
    required=True,
    metavar="N,N,LOW-HIGH",
    help="Sizes of the cluster, in devices: single ones, and ranges that are doubled from one end to the other.",
)
@click.option(
    "--tokens",
    type=TokenCount(),
    default=0.0,
    help="Tokens of the whole run, such as 15T, for days and the critical batch.  [default: those of optimizer.steps]",
)
@device_options
@memory_option
@_search_options
@language_option
@file_option("--svg", help="Write a picture.")
def scale(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    devices: str,
    tokens: float,
    svg: Path | None,
    **options: Any,
) -> None:
    """Find the best plan of JOB at each size of its cluster, and say what more devices bring.

    Strong scaling keeps the batch, weak scaling the batch of a device. Nodes are as in JOB's cluster.
    """
    from shardwright.api.scaled import scaled
    from shardwright.config.base import together
    from shardwright.config.job_file import names_model
    from shardwright.planner.scaling import sizes_of
    from shardwright.planner.search.constraints import constraints_of
    from shardwright.report.output import write_output

    expect_many_actions()
    refuse_tokens(tokens)
    language = options.pop("language")
    keep, between, subject = options.pop("keep"), options.pop("between"), say("job {name}", name=job)

    def load() -> "JobToPlan":
        smallest = sizes_of(devices)[0] if names_model(job) else 0
        return load_to_plan(job, overrides, asked_cluster(options | {"devices": smallest}), as_json, run_tokens=tokens)

    _, constraints, sizes, to_plan = together(
        subject,
        partial(_refuse_plan_overrides, overrides),
        partial(constraints_of, keep, between),
        partial(sizes_of, devices),
        load,
    )
    if not as_json:
        tell_notes(to_plan.notes, aside=as_json)
    with search_shown(command_language()):
        curves = scaled(subject, to_plan.job, sizes, constraints, tokens=round(tokens))
    if svg:
        write_output(svg, curves.svg(language), "--svg")
    tell_answer(as_json, curves.to_dict, lambda: fitting(curves.in_language(language)))


def _refuse_plan_overrides(overrides: tuple[str, ...]) -> None:
    """Raise PlanError for an override of a field of the plan that a search chooses."""
    from shardwright.config.base import PlanError
    from shardwright.config.plan import UNSEARCHED

    keys = {override: override.partition("=")[0].strip() for override in overrides}
    kept = {f"plan.{name}" for name in UNSEARCHED}
    searched = [override for override, key in keys.items() if key.partition(".")[0] == "plan" and key not in kept]
    if searched:
        fault = say(
            "a plan is searched for each size, so {field} would not hold; say --keep {field} in its place",
            field=searched[0],
        )
        raise PlanError("scale --set", [fault])


@click.command(
    cls=PredictCommand,
    brief=("--on", "--tokens", "--keep", "--set", "--json"),
    examples=(
        "compare llama3-8b --on h100-sxm:64 --on b200-sxm:32",
        "compare llama3-8b --on h100-sxm:64@2.50 --on h200-sxm:32@3.20",
    ),
)
@job_options
@click.option(
    "--on",
    "names",
    multiple=True,
    metavar="DEVICE:N[@USD]",
    help="A cluster: N devices in their usual nodes (or 2x4: 2 nodes of 4), and the price of a device and hour.",
)
@click.option(
    "--tokens",
    type=TokenCount(),
    default=0.0,
    help="Tokens of the run that is compared, such as 1e12 or 15T.  [default: 1e12]",
)
@_search_options
@language_option
@click.option("--as-software", is_flag=True, help="Leave out what the job's software (cluster.software) does not have.")
def compare(
    job: str,
    overrides: tuple[str, ...],
    as_json: bool,
    names: tuple[str, ...],
    language: str,
    **search_options: Any,
) -> None:
    """Find the best plan of JOB on each of several clusters, and set their time, money and energy side by side.

    JOB may be a model. The plans are those that `plan` recommends.
    """
    from shardwright.api.compared import compared
    from shardwright.api.found_plans import PlanQuestion

    expect_many_actions()
    with search_shown(command_language()):
        comparison = compared(job, overrides, names, PlanQuestion(**search_options))
    if as_json:
        tell_notes(comparison.notes, aside=True)
    tell_answer(as_json, comparison.to_dict, lambda: comparison.screen(has_colours(), language))
    if not any(cluster.plan for cluster in comparison.clusters):
        sys.exit(1)


COMMANDS = (compare, layout, plan, scale)
