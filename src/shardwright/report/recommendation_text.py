"""All plans as JSON, with their roles; and the difference between the recommended plan and a simpler one in words."""

from collections.abc import Iterator
from typing import Any

from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.planner.advice.advice import Advice, Recommendation, SimplerPlan
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.recommendation import TOLD_APART
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
    return [plan_dict(plan, advice.objective) | _roles(plan, recommendation) for plan in plans]


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


def slower_share(plan: PricedPlan, first: PricedPlan) -> float:
    """The share by which a token of `plan` takes longer than one of `first`."""
    return plan.token_s / first.token_s - 1


def difference_words(simpler: SimplerPlan, first: PricedPlan) -> Iterator[str]:
    """The differences that make a plan simpler than the first, the weightiest first, then the other differences."""
    plan_parts, first_parts = _parts(simpler.plan, first), _parts(first, simpler.plan)
    for is_less, prefix in ((True, ""), (False, "though ")):
        for name in Simplicity._fields:
            amount, first_amount = getattr(simpler.simplicity, name), getattr(simpler.of_recommended, name)
            if amount != first_amount and is_less == (amount < first_amount):
                swap = f"{plan_parts[name]} instead of {first_parts[name]}"
                yield prefix + (
                    swap if plan_parts[name] and first_parts[name] else plan_parts[name] or f"no {first_parts[name]}"
                )


def _parts(plan: PricedPlan, other_plan: PricedPlan) -> dict[str, str]:
    """The words for each part of a plan's simplicity; empty for a part that it lacks."""
    spec, has_stages = plan.job.plan, plan.job.plan.pp > 1
    software = software_of(plan.job.cluster.software)
    missing = [
        name for name in missing_features(software, plan.job) if name not in missing_features(software, other_plan.job)
    ]
    ranks = [f"{axis} {getattr(spec, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(spec, axis) > 1]
    return {
        "num_lacking": f"{', '.join(missing)}, which {software.name} lacks" if missing else "",
        "num_hosted": ", ".join(name for name in kept_on_host(spec) if name not in kept_on_host(other_plan.job.plan)),
        "num_axes": " x ".join(axes_in_use(spec)) or "one rank",
        "num_copies": "second copy of the parameters" if has_stages and spec.num_copies > 1 else "",
        "order": spec.schedule if has_stages else "",
        "num_extras": ", ".join(name for name in extras(plan.job) if name not in extras(other_plan.job)),
        "ranks_of_model": " x ".join(ranks) or "whole models",
        "zero": f"ZeRO-{spec.zero}" if spec.zero else "",
        "stages_per_rank": f"v {spec.stages_per_rank if has_stages else 1}",
    }
