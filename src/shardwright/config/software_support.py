"""What of a plan a generation of software does not have: its catalog entry says what it has, as far as is known."""

from shardwright.config.job import JobSpec
from shardwright.config.software import SoftwareSpec


def lacks(software: SoftwareSpec, job: JobSpec) -> tuple[str, ...]:
    """What the job's plan needs and the software does not have, in words. What is not known is not in it."""
    plan, found = job.plan, []
    if plan.pp > 1 and software.schedules is not None and plan.schedule not in software.schedules:
        found.append(f"schedule {plan.schedule}")
    if software.zero_stages is not None and plan.zero not in software.zero_stages:
        found.append(f"ZeRO-{plan.zero}")
    if software.sequence_parallel is False and plan.sequence_parallel:
        found.append("sequence parallel")
    if software.context_parallel is False and plan.cp > 1:
        found.append("context parallel")
    return tuple(found)
