"""How a command reads a job: with its overrides, checked, so that all that follows may rely on it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec


def load(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job with its overrides, checked. PlanError lists every fault."""
    from shardwright.config.load import load_job

    return _planned(job, load_job(job, list(overrides)))


def load_to_run(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job, checked, for a command that executes it: PlanError also where this runtime can't."""
    from shardwright.config.base import PlanError
    from shardwright.config.runtime_support import runtime_limits

    spec = load(job, overrides)
    if limits := runtime_limits(spec):
        raise PlanError(f"job {job}", limits)
    return spec


@dataclass(frozen=True)
class JobToPlan:
    """A job to find a plan for, checked but for its own plan: `own` has that, if it has one, and `own_faults` what is
    wrong with it."""

    job: "JobSpec"
    own: "JobSpec | None" = None
    own_faults: tuple[str, ...] = ()


def load_to_plan(job: str, overrides: tuple[str, ...]) -> JobToPlan:
    """The job, checked, to find a plan for. A plan of its own may be one that its cluster does not allow."""
    from shardwright.account.budget import meet_budget
    from shardwright.config.base import PlanError
    from shardwright.config.checks.check import job_faults
    from shardwright.config.load import load_to_plan as read
    from shardwright.schedule.job_program import plan_faults

    spec, has_own = read(job, list(overrides))
    if not has_own:
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


def _planned(job: str, spec: "JobSpec") -> "JobSpec":
    """The job with its plan checked too."""
    from shardwright.account.budget import meet_budget
    from shardwright.config.base import PlanError
    from shardwright.schedule.job_program import plan_faults

    if faults := plan_faults(spec):
        raise PlanError(f"job {job}", faults)
    return meet_budget(spec)
