"""What of a plan a generation of software does not have: its catalog entry says what it has, as far as is known."""

from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.config.software import SoftwareSpec


def lacks(software: SoftwareSpec, job: JobSpec) -> tuple[str, ...]:
    """What the job's plan needs and the software does not have, in words. What is not known is not in it."""
    return plan_lacks(software, job.plan)


def had_by(software: SoftwareSpec) -> dict[str, tuple[Any, ...]]:
    """Values of fields of the plan that the software has, as far as its entry says."""
    has = {
        "schedule": software.schedules,
        "zero": software.zero_stages,
        "sequence_parallel": (False,) if software.sequence_parallel is False else None,
        "cp": (1,) if software.context_parallel is False else None,
    }
    return {name: tuple(values) for name, values in has.items() if values is not None}


def plan_lacks(software: SoftwareSpec, plan: PlanSpec) -> tuple[str, ...]:
    """What a plan needs and the software does not have, in words."""
    found = []
    if plan.pp > 1 and software.schedules is not None and plan.schedule not in software.schedules:
        found.append(f"schedule {plan.schedule}")
    if software.zero_stages is not None and plan.zero not in software.zero_stages:
        found.append(f"ZeRO-{plan.zero}")
    if software.sequence_parallel is False and plan.sequence_parallel:
        found.append("sequence parallel")
    if software.context_parallel is False and plan.cp > 1:
        found.append("context parallel")
    return tuple(found)
