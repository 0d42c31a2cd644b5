"""The ZeRO stage of a plan is named only where it does something.

With one replica nothing is shared, and the stages are one plan under several names. The prices
tell whether state is shared: of two plans that are equal in all bytes and seconds, the lower stage is the name of both.
"""

from dataclasses import replace

import numpy as np

from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.results import SimulatedPlan
from shardwright.simulate.closed_form import step_time


def without_idle_zero(plan: SimulatedPlan, constraints: Constraints, constants: Constants) -> SimulatedPlan:
    """The plan under the lowest allowed ZeRO stage that has the same prices; only one replica may have others."""
    fields, num_kept = plan.job.plan, plan.job.plan.zero
    if not num_kept or fields.replicas > 1:
        return plan
    prices = _prices(plan.job, constants)
    for zero in range(num_kept):
        job = plan.job.model_copy(update={"plan": fields.model_copy(update={"zero": zero})})
        if constraints.allows("zero", zero) and not job_faults(job) and _prices(job, constants) == prices:
            return replace(plan, job=job)
    return plan


def _prices(job: JobSpec, constants: Constants) -> tuple[tuple[float, ...], ...]:
    """All seconds of a step and all bytes of its fullest rank, by closed forms."""
    run, memo = run_of(job), Memo()
    return tuple(
        tuple(float(np.max(value)) for value in vars(price).values())
        for price in (step_time(run, constants, memo), peak_memory(run, constants, memo))
    )
