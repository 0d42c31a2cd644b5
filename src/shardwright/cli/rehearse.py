"""The command that runs one rank of a job without its cluster."""

import json

import click

from shardwright.cli.checked_job import load_to_run
from shardwright.cli.job_options import JobCommand, job_options


@click.command(cls=JobCommand)
@job_options
@click.option("--rank", type=int, default=0, show_default=True, help="The rank to run.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="The kind of device that it runs as on; without it cuda where the cluster's device is a GPU.",
)
def dryrun(job: str, overrides: tuple[str, ...], as_json: bool, rank: int, device: str | None) -> None:
    """Run one rank of JOB as it is, but on tensors without memory and with nobody else there.

    Says what the rank holds at its peak, by kind and in which operator, and every collective that it takes part in: in
    seconds, on one CPU, for a plan of any size.
    """
    spec = load_to_run(job, overrides)
    from shardwright.account.zero_replay import runs_on_cpu
    from shardwright.measure.dryrun import dry_run
    from shardwright.report.dryrun_text import dryrun_text

    run = dry_run(spec, rank, device or ("cpu" if runs_on_cpu(spec) else "cuda")).as_dict()
    click.echo(json.dumps(run) if as_json else dryrun_text(spec.name, run))
