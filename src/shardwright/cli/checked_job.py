"""The functions by which commands read a job, as Python programs do (api/asked_job.py), and print notes about it."""

from typing import TYPE_CHECKING

import click

from shardwright.cli.command_language import command_language
from shardwright.cli.progress_bar import search_shown
from shardwright.config.phrase import note_phrase
from shardwright.report.document import paragraph, part_text

if TYPE_CHECKING:
    from shardwright.api.asked_job import AskedJob, JobToPlan
    from shardwright.config.asked_cluster import AskedCluster
    from shardwright.config.job import JobSpec


def load(job: str, overrides: tuple[str, ...], cluster: "AskedCluster | None" = None) -> "JobSpec":
    """The job with its overrides, on the cluster that is asked for, checked. PlanError lists every fault. Notes about
    values that nobody stated go to standard error."""
    asked_job = _asked_job(job, overrides, cluster)
    spec = asked_job.as_planned()
    tell_notes(asked_job.notes, aside=True)
    return spec


def load_predicted(
    job: str, overrides: tuple[str, ...], cluster: "AskedCluster", as_json: bool, run_tokens: float = 0.0
) -> "JobSpec":
    """The job on the cluster that is asked for, checked; a model of the catalog under its best plan there, with as many
    steps as take `run_tokens`, if any.

    Notes about values that nobody stated are printed; on standard error if the output is JSON.
    """
    with search_shown(command_language()):
        spec, notes = _asked_job(job, overrides, cluster, run_tokens).to_predict()
    tell_notes(notes, aside=as_json)
    return spec


def load_to_run(job: str, overrides: tuple[str, ...], cluster: "AskedCluster | None" = None) -> "JobSpec":
    """The job, checked together with its fallback plans, for a command that executes it. Of many ranks that a launcher
    has started, rank 0 tells the notes."""
    from shardwright.train.launch.rank_environment import is_other_rank

    asked_job = _asked_job(job, overrides, cluster)
    if is_other_rank():
        return asked_job.to_run()
    with search_shown(command_language()):
        spec = asked_job.to_run()
    tell_notes(asked_job.to_predict()[1] if asked_job.needs_plan else asked_job.notes, aside=True)
    return spec


def load_to_plan(
    job: str,
    overrides: tuple[str, ...],
    cluster: "AskedCluster | None" = None,
    as_json: bool = False,
    run_tokens: float = 0.0,
) -> "JobToPlan":
    """The job, checked, to find a plan for; of a model with as many steps as take `run_tokens`, if any. Its cluster may
    not allow its own plan.

    Notes about values that nobody stated are those of the answer; if the output is JSON, they go to standard error.
    """
    to_plan = _asked_job(job, overrides, cluster, run_tokens).to_plan()
    if as_json:
        tell_notes(to_plan.notes, aside=True)
    return to_plan


def tell_notes(notes: tuple[str, ...], aside: bool) -> None:
    """Print notes in the language of the command: before its output, or `aside`, on standard error."""
    for note in notes:
        text = part_text(paragraph(note_phrase(note)), command_language())
        click.echo(text + "\n" * (not aside), err=aside)


def _asked_job(
    job: str, overrides: tuple[str, ...], cluster: "AskedCluster | None" = None, run_tokens: float = 0.0
) -> "AskedJob":
    from shardwright.api.asked_job import AskedJob
    from shardwright.config.asked_cluster import NOTHING_ASKED

    return AskedJob(job, overrides, cluster or NOTHING_ASKED, run_tokens)
