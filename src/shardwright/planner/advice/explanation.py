"""The reasons of an advice: why its first plan is best, changes that would alter that, and the user's own plan."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.planner.advice.advice import Advice, OwnPlan, RefusedPlan
from shardwright.planner.advice.priced_plan import priced, searched_schedules
from shardwright.planner.advice.reasons import binding, reasons
from shardwright.planner.advice.repair import misfit
from shardwright.planner.advice.rules import rules_for
from shardwright.planner.advice.sensitivity import flips
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.sample import standing


def explained(
    advice: Advice,
    own_job: JobSpec | None,
    constraints: Constraints,
    constants: Constants,
    own_faults: Sequence[str] = (),
) -> Advice:
    """The advice with its reasons. `own_job` is the job if the user gave a plan: it is compared with the others or, if
    it has faults, shown as refused."""
    if own_job is not None and own_faults:
        advice = replace(advice, refused=RefusedPlan(own_job, tuple(own_faults)))
    elif own_job is not None:
        advice = replace(advice, own=_own_plan(own_job, constraints, constants))
    if not advice.plans:
        return advice
    best, *others = advice.plans
    why = advice.reasons or reasons(best.job, searched_schedules(constraints), constants)
    return replace(
        advice,
        flips=flips(best.job, others[0].job, constants) if others else [],
        reasons=why,
        binding=binding(best.time, best.memory, best.job, why),
        rules=rules_for(best.job),
    )


def _own_plan(job: JobSpec, constraints: Constraints, constants: Constants) -> OwnPlan:
    """The user's plan. Its standing among drawn plans is by closed forms, like their times."""
    (plan,) = priced([job], constants)
    place = standing(job, plan.closed_token_s, constraints, constants)
    return OwnPlan(plan, place, misfit(job, searched_schedules(constraints), constants))
