"""The recommended plan as text, with the reason why it is not the fastest; and all plans as JSON, with their roles."""

import textwrap
from collections.abc import Iterator
from typing import Any

from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.config.units import GIB
from shardwright.planner.advice.advice import Advice, Recommendation
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.recommendation import TOLD_APART
from shardwright.planner.advice.simplicity import Simplicity, axes_in_use, extras, kept_on_host
from shardwright.report.plans_text import job_words, plan_dict, sure_text

_AS_LONG = 5e-4  # a share of a step that would be printed as 0.0%

_WIDTH = 118


def plan_dicts(advice: Advice) -> list[dict[str, Any]]:
    """The plans of `--json`, fastest first: those of the table, and the recommended plan if it is not among them.

    `first_is_faster` is the confidence that the first plan is faster; null for the first plan itself.
    """
    recommendation = advice.recommendation
    plans = list(advice.plans)
    if recommendation and not any(plan is recommendation.plan for plan in plans):
        plans.append(recommendation.plan)
    plans.sort(key=lambda plan: float(plan.time.total) / plan.job.tokens_per_step)
    return [plan_dict(plan, advice.objective.run_tokens) | _roles(plan, recommendation) for plan in plans]


def _roles(plan: PricedPlan, recommendation: Recommendation | None) -> dict[str, Any]:
    confidence = plan.first_is_faster
    return {
        "fastest": confidence is None,
        "recommended": recommendation is not None and plan is recommendation.plan,
        "first_is_faster": confidence,
        "told_apart": confidence is not None and confidence >= TOLD_APART,
    }


def recommendation_text(advice: Advice) -> str:
    """Text with the plan to take, and a sentence with the reason."""
    recommendation = advice.recommendation
    if recommendation is None:
        return ""
    plan = recommendation.plan
    numbers = (
        f"{plan.time.total:.3f} s a step, {plan.tokens_per_s_per_device:,.0f} tokens/s/device, "
        f"MFU {plan.time.mfu:.1%}, {plan.memory.process / GIB:.1f} GiB"
    )
    lines = [f"Recommended: {job_words(plan.job)}", f"  {numbers}", _filled(_why(recommendation, advice.plans[0]))]
    return "\n".join([*lines, *(_filled(line) for line in _similar_plans(advice))])


def _why(recommendation: Recommendation, fastest: PricedPlan) -> str:
    if recommendation.is_fastest:
        return "It is the fastest plan that was found, and of those that can't be told apart from it none is simpler."
    plan = recommendation.plan
    slower = (
        float(plan.time.total / plan.job.tokens_per_step) / float(fastest.time.total / fastest.job.tokens_per_step) - 1
    )
    simpler = "; ".join(_differences(recommendation, fastest)) or "it is as simple"
    if slower < _AS_LONG:
        return f"It takes as long as the fastest plan that was found, and is simpler: {simpler}."
    return (
        f"It is predicted to be {slower:.1%} slower than the fastest plan ({fastest.time.total:.3f} s), of which it is "
        f"{sure_text(recommendation.confidence)} sure that it is faster, less than the {TOLD_APART:.0%} from which "
        f"plans are told apart; and it is the simplest of those that can't be: {simpler}."
    )


def _differences(recommendation: Recommendation, fastest: PricedPlan) -> Iterator[str]:
    """The differences that make a plan simpler than the fastest, the weightiest first, then the other differences."""
    plan_parts, fastest_parts = _parts(recommendation.plan, fastest), _parts(fastest, recommendation.plan)
    for is_less, prefix in ((True, ""), (False, "though ")):
        for name in Simplicity._fields:
            amount, fastest_amount = getattr(recommendation.simplicity, name), getattr(recommendation.of_fastest, name)
            if amount != fastest_amount and is_less == (amount < fastest_amount):
                swap = f"{plan_parts[name]} instead of {fastest_parts[name]}"
                yield prefix + (
                    swap
                    if plan_parts[name] and fastest_parts[name]
                    else plan_parts[name] or f"no {fastest_parts[name]}"
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


def _similar_plans(advice: Advice) -> Iterator[str]:
    """A sentence about the plans of the table that can't be told apart from the first."""
    numbered = [(number, plan.first_is_faster) for number, plan in enumerate(advice.plans, 1)]
    similar = [str(number) for number, confidence in numbered if confidence is not None and confidence < TOLD_APART]
    if similar:
        plans = f"plan {similar[0]}" if len(similar) == 1 else f"plans {', '.join(similar[:-1])} and {similar[-1]}"
        yield f"Of the plans below, {plans} can't be told apart from the first."


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
