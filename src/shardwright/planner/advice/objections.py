"""The best plans to which there is no objection: a search that finds others is made again without their values.

A search returns the fastest plan of each kind. If that has a value that cannot be used, as a system has no name for
it, the kind's next plans are not among its results; so the value is left out, and the next search finds them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.recommendation import accepted, plans_of, recommended
from shardwright.planner.search.constraints import RANGES, SEARCHED, Constraints
from shardwright.planner.search.objectives import Objective
from shardwright.planner.search.step_times import plan_key

_SEARCHES = 4  # at most
# Fields whose value is a choice between ways to do the same: one less leaves plans of every degree.
_WAYS = {*SEARCHED, "layout"} - {*RANGES}


@dataclass(frozen=True)
class Objection:
    """The reason, in words, why a plan cannot be used as it is, and its fields (without section) that are at fault."""

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def plans_without_objection(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    objective: Objective,
    num_shown: int,
    *,
    objection: Callable[[JobSpec], Objection | None],
) -> tuple[Advice, Objection | None]:
    """The best plans to which there is no objection, and the objection to the fastest plan of all, if there is one.

    The advice has no plan if there is an objection to each. PlanError if no plan meets the deadline.
    """
    objections: dict[str, Objection | None] = {}  # to write and read a plan's files takes as long as to price it

    def asked(plan_job: JobSpec) -> Objection | None:
        if (key := plan_key(plan_job)) not in objections:
            objections[key] = objection(plan_job)
        return objections[key]

    first_objection: Objection | None = None
    usable: dict[tuple[int, ...], PricedPlan] = {}
    left, advice = constraints, None
    for _ in range(_SEARCHES):
        try:
            latest = plans_of(job, left, constants, objective, num_shown=num_shown)
        except PlanError:
            if advice is None:
                raise
            break  # what was left out was needed
        if advice is None:
            first_objection = asked(latest.plans[0].job) if latest.plans else None
        elif latest.job != advice.job:
            usable = {}  # plans of another number of nodes are no rivals
        advice = latest
        refused = _divide(advice.plans, usable, asked)
        if not refused:
            break
        left = left.without(refused)
    assert advice is not None, "there is at least one search"
    plans = [replace(plan, first_is_faster=None) for plan in sorted(usable.values(), key=attrgetter("token_s"))]
    if not plans:
        return replace(advice, plans=[], recommendation=None), first_objection
    best = recommended(replace(advice, plans=plans), left, constants, num_shown=num_shown)
    return accepted(best, lambda plan_job: asked(plan_job) is not None), first_objection


def _divide(
    plans: Iterable[PricedPlan], usable: dict[tuple[int, ...], PricedPlan], asked: Callable[[JobSpec], Objection | None]
) -> dict[str, list[Any]]:
    """Put the fastest plan of each kind to which there is no objection into `usable`, and return the values at fault,
    by field, of plans that would be faster than all of these."""
    refused = dict[str, list[Any]]()
    for plan in sorted(plans, key=attrgetter("token_s")):
        if (reason := asked(plan.job)) is None:
            if plan.kind not in usable or plan.token_s < usable[plan.kind].token_s:
                usable[plan.kind] = plan
        elif all(plan.token_s < other.token_s for other in usable.values()):
            for name, value in reason.fields.items():
                if name in _WAYS:
                    refused.setdefault(name, []).append(value)
    return refused
