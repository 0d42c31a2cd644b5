"""The command that writes the files or commands that start a job on its cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.checked_job import load_to_run
from shardwright.cli.command_language import tell
from shardwright.cli.interchange import job_to_export
from shardwright.cli.job_options import JobCommand, file_option, job_options, language_option
from shardwright.cli.system_option import SystemOption
from shardwright.config.phrase import ENGLISH, either, note_phrase, say
from shardwright.report.document import paragraph, part_text

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec
    from shardwright.report.launch.launch_description import Launch
    from shardwright.report.launch.launch_options import Launcher, LaunchOptions

_LAUNCHERS: "tuple[Launcher, ...]" = ("slurm", "kubernetes", "torchrun")


@click.command(
    cls=JobCommand,
    brief=("--slurm", "--kubernetes", "--torchrun", "--for", "--out"),
    examples=(
        "launch chosen.toml --slurm --out run.sh",
        "launch chosen.toml --slurm --for megatron --out run.sh",
        "launch chosen.toml --torchrun --first-node node001",
    ),
)
@job_options
@language_option
@click.option("--slurm", is_flag=True, help="A script for sbatch.")
@click.option("--kubernetes", is_flag=True, help="A manifest for kubectl: a Job with an index for each server.")
@click.option("--torchrun", is_flag=True, help="The command line of each node.")
@file_option("--out", help="Write it to a file.  [default: standard output]")
@click.option("--time", default="", metavar="TIME", help="Time limit: minutes, HH:MM:SS or D-HH:MM:SS.")
@click.option(
    "--save-before",
    type=click.IntRange(1),
    default=None,
    metavar="SECONDS",
    help="Seconds that a run gets to save and leave.  [default: as measured by this run before, or predicted]",
)
@click.option("--port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="Port where ranks meet.")
@click.option("--account", default="", metavar="NAME", help="Slurm: whom it is charged to.")
@click.option("--partition", default="", metavar="NAME", help="Slurm: the partition of nodes.")
@click.option("--image", default="", metavar="IMAGE", help="Run in containers of this image; Slurm takes pyxis for it.")
@click.option("--claim", default="", metavar="NAME", help="Kubernetes: the PersistentVolumeClaim that runs write to.")
@click.option("--first-node", default="", metavar="HOST", help="torchrun: name or address of the first node.")
@click.option(
    "--for",
    "target",
    cls=SystemOption,
    is_written=True,
    help="Slurm: run JOB with this software, megatron or torchtitan, and not with this runtime.",
)
def launch(
    job: str, overrides: tuple[str, ...], as_json: bool, language: str, out: Path | None, **launch_fields: Any
) -> None:
    """Write what starts JOB on its cluster: a script for Slurm, a manifest for Kubernetes, or torchrun's command lines.

    Nodes and ranks follow from the cluster and the plan, restarts and saving from [run] and [checkpoint], what NCCL is
    told of the links from [cluster.network]. Notes on standard error tell what nobody has stated.
    """
    from shardwright.report.launch.launch_options import LaunchOptions

    launchers = tuple(name for name in _LAUNCHERS if launch_fields.pop(name))
    options = LaunchOptions(launchers, **{name: value for name, value in launch_fields.items() if value is not None})
    description = _description(job, overrides, options)
    text, notes = _software_text_and_notes(description) if options.target else _text_and_notes(description)
    if out is not None:
        from shardwright.report.output import write_output

        write_output(out, text, "--out")
    for note in notes:
        click.echo(part_text(paragraph(note_phrase(note)), ENGLISH if as_json else language), err=True)
    if as_json:
        click.echo(json.dumps(_as_dict(description, text, notes)))
    elif out is None:
        click.echo(text, nl=False)
    else:
        tell(
            say(
                "{heading}: written to {file}; start it with `{command}`",
                heading=description.heading,
                file=str(out),
                command=_start(description, out),
            )
        )


def _description(job: str, overrides: tuple[str, ...], options: "LaunchOptions") -> "Launch":
    """The description of a launch. PlanError with every fault of the job and of the options."""
    from shardwright.api.run_start import refuse_unstated
    from shardwright.config.base import PlanError
    from shardwright.report.launch.launch_description import launch_of
    from shardwright.train.launch.run_folder import folder_of

    try:
        spec = _job_of_target(job, overrides, options.target) if options.target else load_to_run(job, overrides)
    except PlanError as error:
        raise PlanError(error.subject, error.faults + options.faults(), error.way_out) from None
    words = (job, *(word for override in overrides for word in ("--set", override)))
    description = launch_of(spec, words, options, folder=Path.cwd(), run_folder=folder_of(spec))
    refuse_unstated(spec, description.layout.servers, or_long=True)
    return description


def _job_of_target(job: str, overrides: tuple[str, ...], target: str) -> "JobSpec":
    """The job for other software, under a plan that it has. Raises PlanError."""
    from shardwright.config.asked_cluster import NOTHING_ASKED
    from shardwright.config.base import PlanError
    from shardwright.interchange.exported import Lacking, exported
    from shardwright.interchange.system import SYSTEMS
    from shardwright.report.imported_text import nearest_export

    system = SYSTEMS[target]
    if system.run_files is None:
        known = [one.name for one in SYSTEMS.values() if one.run_files is not None]
        fault = say(
            "--for {name}: how its data and checkpoints are said is not known here; take {known}, or `shardwright "
            "export JOB --to {name}` and add them",
            name=target,
            known=either(known),
        )
        raise PlanError(say("job {name}", name=job), [fault])
    spec = job_to_export(system, job, overrides, NOTHING_ASKED)
    try:
        exported(system, spec)
    except Lacking as error:
        raise PlanError(error.subject, error.faults, nearest_export(system, spec, error)) from None
    return spec


def _software_text_and_notes(description: "Launch") -> tuple[str, list[str]]:
    """The text to write for other software, and notes to print. Raises PlanError."""
    from shardwright.api.run_start import regretted_warmup, unseen_paths
    from shardwright.interchange.system import SYSTEMS
    from shardwright.report.launch.launch_description import predicted_step_s
    from shardwright.report.launch.software_script import software_notes, software_script

    system, job = SYSTEMS[description.options.target], description.job
    assert system.run_files is not None
    files = system.run_files.write(job, description.folder, predicted_step_s(job))
    unseen = unseen_paths(job, description.folder)
    notes = [*regretted_warmup(job), *unseen, *description.notes, *software_notes(description, system)]
    return software_script(description, system, files), notes


def _text_and_notes(description: "Launch") -> tuple[str, list[str]]:
    """The text to write, and notes to print."""
    from shardwright.api.run_start import regretted_defaults, unseen_paths

    launcher = description.options.launcher
    unseen = unseen_paths(description.job, description.folder)
    notes = [*regretted_defaults(description.job), *unseen, *description.notes]
    if launcher == "slurm":
        from shardwright.report.launch.slurm_script import slurm_script

        return slurm_script(description), notes
    if launcher == "torchrun":
        from shardwright.report.launch.torchrun_command import torchrun_command, torchrun_notes

        return torchrun_command(description), notes + torchrun_notes(description)
    from shardwright.report.launch.kubernetes_manifest import kubernetes_manifest, kubernetes_notes

    return kubernetes_manifest(description), notes + kubernetes_notes(description)


def _start(description: "Launch", out: Path) -> str:
    return {"slurm": f"sbatch {out}", "kubernetes": f"kubectl create -f {out}", "torchrun": f"bash {out}"}[
        description.options.launcher
    ]


def _as_dict(description: "Launch", text: str, notes: list[str]) -> dict[str, Any]:
    layout = description.layout
    return {
        "launcher": description.options.launcher,
        "servers": layout.servers,
        "ranks_per_server": layout.ranks_per_server,
        "ranks": description.job.plan.world,
        "port": description.options.port,
        "environment": description.links.variables,
        "left_to_you": {unset.variable: unset.meaning for unset in description.links.placeholders},
        "max_restarts": description.max_restarts,
        "save_s": description.save_s or None,
        "time_limit_s": description.options.limit_s or None,
        "notes": notes,
        "text": text,
    }
