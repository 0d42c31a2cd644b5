"""How a command reads a job: with its overrides, checked, so that all that follows may rely on it."""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardwright.config.asked_cluster import AskedCluster
    from shardwright.config.job import JobSpec


def load(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job with its overrides, checked. PlanError lists every fault; what nobody stated goes to standard error."""
    from shardwright.config.load import make_job, read_job

    read = read_job(job, list(overrides))
    spec = make_job(read.fields, f"job {job}")
    say(read.filled_in, as_json=True)
    return planned(job, spec)


def load_predicted(job: str, overrides: tuple[str, ...], asked: "AskedCluster", as_json: bool) -> "JobSpec":
    """The job on the cluster that is asked for, checked; a model of the catalog under its best plan there.

    What nobody stated is said: on standard error beside JSON.
    """
    from shardwright.config.load import job_to_plan, make_job, read_job

    read = read_job(job, list(overrides), asked)
    say(read.filled_in, as_json)
    if not read.is_model or read.fields.get("plan"):
        return planned(job, make_job(read.fields, f"job {job}"))
    return _under_best_plan(job, job_to_plan(read.fields, f"job {job}"), as_json)


def say(note: str, as_json: bool) -> None:
    """A note before what a command prints."""
    if note:
        click.echo(textwrap.fill(f"Note: {note}.", 110, break_on_hyphens=False) + "\n" * (not as_json), err=as_json)


def _under_best_plan(job: str, spec: "JobSpec", as_json: bool) -> "JobSpec":
    from shardwright.config.base import PlanError
    from shardwright.cost.calibration import shipped
    from shardwright.planner.advice.recommendation import plans_of
    from shardwright.planner.search.constraints import Constraints
    from shardwright.report.plans_text import plan_words

    try:
        found = plans_of(spec, Constraints(), shipped()).recommendation
    except KeyError as error:
        raise PlanError(f"job {job}", [str(error.args[0])]) from None
    if found is None:
        fault = f"no plan of {job} fits on {spec.cluster.num_devices:,} {spec.cluster.device}; use more --devices"
        raise PlanError(f"job {job}", [fault])
    best = found.plan.job
    say(f"the plan is what `plan` recommends: {plan_words(best.plan)}; set plan.tp and others for your own", as_json)
    return best


def load_to_run(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job, checked with the plans that it falls back to, for a command that executes it."""
    from shardwright.config.base import PlanError

    spec = load(job, overrides)
    faults = []
    for number in range(len(spec.plan.fallback)):
        try:
            planned(job, spec.model_copy(update={"plan": spec.plan.fallback_plan(number)}))
        except PlanError as error:
            faults += [f"plan.fallback[{number}]: {fault}" for fault in error.faults]
    if faults:
        raise PlanError(f"job {job}", faults)
    return spec


@dataclass(frozen=True)
class JobToPlan:
    """A job to find a plan for, checked but for its own plan: `own` has that, if it has one, and `own_faults` what is
    wrong with it."""

    job: "JobSpec"
    own: "JobSpec | None" = None
    own_faults: tuple[str, ...] = ()


def load_to_plan(
    job: str, overrides: tuple[str, ...], asked: "AskedCluster | None" = None, as_json: bool = False
) -> JobToPlan:
    """The job, checked, to find a plan for. A plan of its own may be one that its cluster does not allow."""
    from shardwright.account.budget import meet_budget
    from shardwright.config.asked_cluster import NOTHING_ASKED
    from shardwright.config.base import PlanError
    from shardwright.config.checks.check import job_faults
    from shardwright.config.load import job_to_plan, read_job
    from shardwright.schedule.job_program import plan_faults

    read = read_job(job, list(overrides), asked or NOTHING_ASKED)
    spec = job_to_plan(read.fields, f"job {job}")
    say(read.filled_in, as_json)
    if not read.fields.get("plan"):
        return JobToPlan(spec)
    faults = job_faults(spec) or plan_faults(spec)
    if not faults:
        try:
            spec = meet_budget(spec)
        except PlanError as error:
            faults = error.faults
    if faults:
        return JobToPlan(spec.model_copy(update={"plan": spec.plan.unsearched()}), spec, tuple(faults))
    return JobToPlan(spec, spec)


def planned(job: str, spec: "JobSpec") -> "JobSpec":
    """The job with its plan checked too."""
    from shardwright.account.budget import meet_budget
    from shardwright.config.base import PlanError
    from shardwright.schedule.job_program import plan_faults

    if faults := plan_faults(spec):
        raise PlanError(f"job {job}", faults)
    return meet_budget(spec)
