"""The claims that touch a job, in the order of their subjects."""

from shardwright.config.job import JobSpec
from shardwright.explain.contradictions import (
    told_degrees,
    told_devices,
    told_memory,
    told_model,
    told_pipeline,
    told_traffic,
)
from shardwright.explain.contradictions.told_claim import Contradiction

CLAIMS = (
    *told_model.CLAIMS,
    *told_memory.CLAIMS,
    *told_degrees.CLAIMS,
    *told_pipeline.CLAIMS,
    *told_devices.CLAIMS,
    *told_traffic.CLAIMS,
)


def contradictions(job: JobSpec) -> list[Contradiction]:
    """The claims that the job touches, each with what holds for it. The job was checked."""
    checked = ((claim, claim.check(job)) for claim in CLAIMS)
    return [Contradiction(claim.name, claim.told, holds) for claim, holds in checked if holds is not None]
