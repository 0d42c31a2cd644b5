"""What whoever predicts a job should say beside the prediction."""

from shardwright.config.job import JobSpec
from shardwright.config.runtime_support import runtime_limits
from shardwright.report.stated_numbers import told_notes


def job_notes(job: JobSpec) -> list[str]:
    """Sentences: told numbers that contradict others, and what keeps this runtime from running the job."""
    return [*told_notes(job), *(f"this runtime can't run it: {limit}" for limit in runtime_limits(job))]
