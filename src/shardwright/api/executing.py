"""A step of a job that this machine performs, beside its simulation: what `simulate --execute` shows."""

from shardwright.config.job import JobSpec
from shardwright.report.timeline.job_study import JobStudy, study_executed


def run_and_study(job: JobSpec) -> JobStudy:
    """Measure the stages on this machine, simulate a step with that, run some steps, and compare. Raises PlanError,
    RunError."""
    from shardwright.train.launch.fork_server import start_server_early

    start_server_early(job.run.device)
    from shardwright.measure.step_time import compare_step_time
    from shardwright.train.launch.scratch_folder import scratch_folder

    with scratch_folder() as folder:
        comparison = compare_step_time(job, folder)
    return study_executed(job, comparison.costs, comparison.executed(), comparison.executed_s)
