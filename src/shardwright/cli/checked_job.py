"""How a command reads a job: as Python programs do (api/asked_job.py), and it says what nobody stated."""

import textwrap
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardwright.api.asked_job import AskedJob, JobToPlan
    from shardwright.config.asked_cluster import AskedCluster
    from shardwright.config.job import JobSpec


def load(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job with its overrides, checked. PlanError lists every fault; what nobody stated goes to standard error."""
    asked = _asked(job, overrides)
    spec = asked.as_planned()
    say(asked.notes, as_json=True)
    return spec


def load_predicted(job: str, overrides: tuple[str, ...], asked: "AskedCluster", as_json: bool) -> "JobSpec":
    """The job on the cluster that is asked for, checked; a model of the catalog under its best plan there.

    What nobody stated is said: on standard error beside JSON.
    """
    spec, notes = _asked(job, overrides, asked).to_predict()
    say(notes, as_json)
    return spec


def load_to_run(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job, checked with the plans that it falls back to, for a command that executes it."""
    asked = _asked(job, overrides)
    spec = asked.to_run()
    say(asked.notes, as_json=True)
    return spec


def load_to_plan(
    job: str, overrides: tuple[str, ...], asked: "AskedCluster | None" = None, as_json: bool = False
) -> "JobToPlan":
    """The job, checked, to find a plan for. A plan of its own may be one that its cluster does not allow."""
    found = _asked(job, overrides, asked)
    to_plan = found.to_plan()
    say(found.notes, as_json)
    return to_plan


def say(notes: tuple[str, ...], as_json: bool) -> None:
    """Notes before what a command prints."""
    for note in notes:
        click.echo(textwrap.fill(f"Note: {note}.", 110, break_on_hyphens=False) + "\n" * (not as_json), err=as_json)


def _asked(job: str, overrides: tuple[str, ...], asked: "AskedCluster | None" = None) -> "AskedJob":
    from shardwright.api.asked_job import AskedJob
    from shardwright.config.asked_cluster import NOTHING_ASKED

    return AskedJob(job, overrides, asked or NOTHING_ASKED)
