"""A chooser of plans for tests: the fastest of a handful that fits, priced one by one."""

from itertools import product

from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.cost.calibration import device_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.rank_estimate import peak_memory
from shardwright.schedule.job_program import plan_faults
from shardwright.simulate.closed_form import step_time


def best_of_few(job: JobSpec) -> JobSpec | None:
    """The job under the fastest of few plans; None if none fits."""
    constants, results = shipped(), []
    devices = job.cluster.num_devices
    for tp, pp, again in product((1, 8), (1, 2, 4, 8), ("none", "full")):
        if devices % (tp * pp):
            continue
        plan = PlanSpec(dp=devices // (tp * pp), tp=tp, pp=pp, sequence_parallel=tp > 1, zero=1, recompute=again)  # type: ignore[arg-type]
        planned = job.model_copy(update={"plan": plan})
        if job_faults(planned) or plan_faults(planned):
            continue
        run = run_of(planned)
        if peak_memory(run, constants).process <= device_of(run.device).offered_bytes:
            results.append((step_time(run, constants).total, planned))
    return min(results, key=lambda pair: pair[0])[1] if results else None
