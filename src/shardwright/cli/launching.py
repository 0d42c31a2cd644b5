"""The command that writes the files or commands that start a job on its cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.checked_job import load_to_run
from shardwright.cli.command_language import tell
from shardwright.cli.interchange import job_to_export
from shardwright.cli.job_options import JobCommand, file_option, job_options, language_option
from shardwright.cli.system_option import RunSystemOption
from shardwright.config.phrase import ENGLISH, note_phrase, say
from shardwright.report.document import paragraph, part_text

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec


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
@click.option("--port", type=int, default=29500, show_default=True, help="Port where ranks meet.")
@click.option("--account", default="", metavar="NAME", help="Slurm: whom it is charged to.")
@click.option("--partition", default="", metavar="NAME", help="Slurm: the partition of nodes.")
@click.option("--image", default="", metavar="IMAGE", help="Run in containers of this image; Slurm takes pyxis for it.")
@click.option("--claim", default="", metavar="NAME", help="Kubernetes: the PersistentVolumeClaim that runs write to.")
@click.option("--first-node", default="", metavar="HOST", help="torchrun: name or address of the first node.")
@click.option(
    "--for",
    "target",
    cls=RunSystemOption,
    is_written=True,
    help="Slurm: run JOB with this software, and not with this runtime.",
)
def launch(
    job: str, overrides: tuple[str, ...], as_json: bool, language: str, out: Path | None, **launch_fields: Any
) -> None:
    """Write what starts JOB on its cluster: a script for Slurm, a manifest for Kubernetes, or torchrun's command lines.

    Nodes and ranks follow from the cluster and the plan, restarts and saving from [run] and [checkpoint], what NCCL is
    told of the links from [cluster.network]. Notes on standard error tell what nobody has stated.
    """
    from shardwright.api.launched import launched, words_of
    from shardwright.config.base import PlanError
    from shardwright.report.launch.launch_options import LAUNCHERS, LaunchOptions

    launchers = tuple(name for name in LAUNCHERS if launch_fields.pop(name))
    options = LaunchOptions(launchers, **{name: value for name, value in launch_fields.items() if value is not None})
    try:
        spec = _job_of_target(job, overrides, options.target) if options.target else load_to_run(job, overrides)
    except PlanError as error:
        raise PlanError(error.subject, error.faults + options.faults(), error.way_out) from None
    result = launched(spec, words_of(job, overrides), options)
    start = "" if out is None else result.save(out, "--out")
    for note in result.notes:
        click.echo(part_text(paragraph(note_phrase(note)), ENGLISH if as_json else language), err=True)
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    elif out is None:
        click.echo(result.script, nl=False)
    else:
        tell(
            say(
                "{heading}: written to {file}; start it with `{command}`",
                heading=result.description.heading,
                file=str(out),
                command=start,
            )
        )


def _job_of_target(job: str, overrides: tuple[str, ...], target: str) -> "JobSpec":
    """The job for other software, under a plan that it has. Raises PlanError."""
    from shardwright.api.exported_job import exported_job
    from shardwright.api.launched import system_that_runs
    from shardwright.config.asked_cluster import NOTHING_ASKED

    system = system_that_runs(target, say("job {name}", name=job))
    spec = job_to_export(system, job, overrides, NOTHING_ASKED)
    exported_job(system, spec)  # which refuses what the system lacks
    return spec
