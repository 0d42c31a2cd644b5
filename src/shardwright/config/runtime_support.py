"""What a job may be, and be priced, but this runtime can't execute yet: refused by what runs, told by what predicts."""

from shardwright.config.job import JobSpec


def runtime_limits(job: JobSpec) -> list[str]:
    """What keeps the runtime from a job that does not contradict itself, each with a way out. Empty if it can run."""
    if job.precision.float8 == "none" or not job.model.moe.experts:
        return []
    return [
        f"precision.float8 {job.precision.float8!r} has no products of experts in this runtime yet; use "
        'precision.float8 = "none", or a model without experts'
    ]
