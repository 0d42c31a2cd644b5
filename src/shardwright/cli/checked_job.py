"""How a command reads a job: with its overrides, checked, so that all that follows may rely on it."""

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


def load_to_plan(job: str, overrides: tuple[str, ...]) -> "tuple[JobSpec, bool]":
    """The job, checked, to find a plan for; and whether it has one of its own."""
    from shardwright.config.load import load_to_plan as read

    spec, has_own = read(job, list(overrides))
    return (_planned(job, spec) if has_own else spec), has_own


def _planned(job: str, spec: "JobSpec") -> "JobSpec":
    """The job with its plan checked too."""
    from shardwright.account.budget import meet_budget
    from shardwright.config.base import PlanError
    from shardwright.schedule.job_program import plan_faults

    if faults := plan_faults(spec):
        raise PlanError(f"job {job}", faults)
    return meet_budget(spec)
