"""All plans as JSON, with their roles; and the difference between the recommended plan and a simpler one in words."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.planner.advice.advice import Advice, Recommendation, SimplerPlan
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.recommendation import TOLD_APART
from shardwright.planner.advice.rules import first_place_of_state
from shardwright.planner.advice.simplicity import Simplicity, axes_in_use, extras, kept_on_host
from shardwright.report.plans_text import plan_dict


def plan_dicts(advice: Advice) -> list[dict[str, Any]]:
    """The plans of `--json`, the recommended one first, the others by their speed: those of the
    table, and the simpler one beside the recommended if it is not among them.

    `first_is_faster` is the confidence that the first plan is faster; null for the first plan itself.
    """
    recommendation = advice.recommendation
    plans = list(advice.plans)
    simpler = recommendation.simpler if recommendation else None
    if simpler and not any(plan is simpler.plan for plan in plans):
        plans.append(simpler.plan)
        plans[1:] = sorted(plans[1:], key=lambda plan: plan.token_s)
    return [plan_dict(plan, advice.objective) | _roles(plan, recommendation) | _branch(plan.job) for plan in plans]


def _roles(plan: PricedPlan, recommendation: Recommendation | None) -> dict[str, Any]:
    confidence = plan.first_is_faster
    simpler = recommendation.simpler if recommendation else None
    return {
        "fastest": confidence is None,
        "recommended": recommendation is not None and plan is recommendation.plan,
        "simpler": simpler is not None and plan is simpler.plan,
        "first_is_faster": confidence,
        "told_apart": confidence is not None and confidence >= TOLD_APART,
    }


def _branch(job: JobSpec) -> dict[str, Any]:
    """The branch of the tree of `learn choosing` on which the job stands, as `explain --json` has it."""
    rule = first_place_of_state(job)
    return {"choosing": None if rule is None else {"says": rule.says, "agrees": rule.agrees}}


def slower_share(plan: PricedPlan, first: PricedPlan) -> float:
    """The share by which a token of `plan` takes longer than one of `first`."""
    return plan.token_s / first.token_s - 1


def difference_words(simpler: SimplerPlan, first: PricedPlan) -> Iterator[str]:
    """The differences that make a plan simpler than the first, the weightiest first, then the other differences."""
    plan_parts, first_parts = _parts(simpler.plan, first), _parts(first, simpler.plan)
    for is_less in (True, False):
        for name in Simplicity._fields:
            amount, first_amount = getattr(simpler.simplicity, name), getattr(simpler.recommended_simplicity, name)
            if amount != first_amount and is_less == (amount < first_amount):
                difference = _difference(plan_parts[name], first_parts[name])
                yield difference if is_less else say("though {difference}", difference=difference)


def _difference(part: str, other: str) -> str:
    """The words for a part of a plan and that of another plan, of which one may be empty."""
    if part and other:
        return say("{part} instead of {other}", part=part, other=other)
    return part or say("no {part}", part=other)


def _parts(plan: PricedPlan, other_plan: PricedPlan) -> dict[str, str]:
    """The words for each part of a plan's simplicity; empty for a part that it lacks."""
    spec, has_stages = plan.job.plan, plan.job.plan.pp > 1
    software = software_of(plan.job.cluster.software)
    missing = _without(missing_features(software, plan.job), missing_features(software, other_plan.job))
    hosted = _without(kept_on_host(spec), kept_on_host(other_plan.job.plan))
    ranks = [f"{axis} {getattr(spec, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(spec, axis) > 1]
    return {
        "num_lacking": say("{missing}, which {software} lacks", missing=missing, software=software.name)
        if missing
        else "",
        "num_hosted": say("{listed}", listed=hosted),
        "num_axes": " x ".join(axes_in_use(spec)) or say("one rank"),
        "num_copies": say("second copy of the parameters") if has_stages and spec.num_copies > 1 else "",
        "order": spec.schedule if has_stages else "",
        "num_extras": say("{listed}", listed=_without(extras(plan.job), extras(other_plan.job))),
        "ranks_of_model": " x ".join(ranks) or say("whole models"),
        "zero": f"ZeRO-{spec.zero}" if spec.zero else "",
        "stages_per_rank": f"v {spec.stages_per_rank if has_stages else 1}",
    }


def _without(names: Iterable[str], others: Collection[str]) -> tuple[str, ...]:
    """The names that are not among others."""
    return tuple(name for name in names if name not in others)
