"""Check that the run can carry out the requests of its health section."""

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES


def health_faults(job: JobSpec) -> list[str]:
    """Faults of `health`: requests that the job can't carry out, each with a way out."""
    health, faults = job.health, []
    policies = {"not_finite": health.not_finite, "spike": health.spike}
    for field, policy in policies.items():
        if policy == "rewind" and not job.checkpoint.is_on:
            faults.append(
                f'health.{field} = "rewind" goes back to the last checkpoint, and the run writes none; set '
                f'checkpoint.every_steps, or health.{field} to "stop"'
            )
        if policy == "skip" and not SCHEDULES[job.plan.schedule].drains:
            faults.append(
                f'health.{field} = "skip" leaves the update of a step out, and schedule {job.plan.schedule!r} has made '
                f'it before the loss of the step is known; use "stop" or "rewind", or a schedule that drains'
            )
    if health.repeat_every and not SCHEDULES[job.plan.schedule].drains:
        faults.append(
            f"health.repeat_every {health.repeat_every} computes a step twice from the same weights, and schedule "
            f"{job.plan.schedule!r} updates them while the pipeline is full; set it to 0, or use a schedule that drains"
        )
    if health.repeat_every and job.plan.compress != "none":
        faults.append(
            f"health.repeat_every {health.repeat_every} computes a step twice, and plan.compress = "
            f"{job.plan.compress!r} would add what it lost to the next gradient twice; set one of them to nothing"
        )
    return faults
