"""The job's own plan beside the best one: how far it is off, its standing, and why it does not fit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.config.link_words import link_words
from shardwright.config.plan import PlanSpec
from shardwright.config.units import GIB
from shardwright.planner.advice.advice import OwnPlan
from shardwright.planner.advice.neighbours import recompute_words
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.report.fit_verdict import offered_bytes
from shardwright.report.plans_text import job_words, step_text
from shardwright.report.text_columns import filled

if TYPE_CHECKING:  # these modules are loaded only when a plan is explained
    from shardwright.planner.advice.repair import Misfit
    from shardwright.planner.search.sample import Standing

_MANY_FASTER = 0.03  # a share of the plans of the space
_LEAST = 5e-4  # of a step: smaller parts and differences are left out


def own_paragraphs(own_plan: OwnPlan, plans: list[PricedPlan]) -> Iterator[str]:
    """The job's own plan: its distance from the best plan, its standing, and the reason why it does not fit, if so."""
    own_priced, standing = own_plan.priced, own_plan.standing
    text = f"The job's own plan ({job_words(own_priced.job)}) takes {step_text(own_priced.time.total)}"
    if plans:
        best_token_s = plans[0].time.total / plans[0].job.tokens_per_step
        excess = float(own_priced.time.total / own_priced.job.tokens_per_step / best_token_s) - 1
        if abs(excess) < _LEAST:
            text += ", as long as the best"
        else:
            text += f", {excess:.1%} more than the best" if excess >= 0 else f", {-excess:.1%} less than the best found"
    text += f", at {own_priced.memory.process / GIB:.1f} GiB. {_standing_text(standing)}"
    yield filled(text)
    if own_plan.misfit:
        yield _misfit_text(own_plan.misfit, own_priced)


def own_differences(own_plan: OwnPlan, best: PricedPlan) -> Iterator[str]:
    """A paragraph on what sets the job's own plan apart from a best plan that is much faster."""
    if own_plan.misfit is None and own_plan.standing.share_faster > _MANY_FASTER:
        changes = ", ".join(_changes(own_plan.priced.job.plan, best.job.plan))
        yield filled(
            "What the authors of the job's own plan knew and this model does not (software that lacks a schedule, "
            "limits of numerics or of operations, a device that is shared) would have to be worth that much: the best "
            f"plan has {changes}."
        )


def _standing_text(sample: "Standing") -> str:
    if not sample.num_fit:
        return f"None of {sample.num_drawn:,} plans drawn from the space fits."
    faster = f"{sample.share_faster:.1%} are" if sample.share_faster >= _LEAST else "hardly one is"
    faster = "none is" if not sample.share_faster else faster
    return f"Of {sample.num_fit:,} plans that fit, among {sample.num_drawn:,} drawn from the space, {faster} faster."


# Fields that other words describe, and `fallback`, which has plans for other numbers of ranks.
_UNLISTED_FIELDS = ("layout", "recompute", "recompute_operators", "recompute_every", "fallback")


def _changes(own_plan: PlanSpec, best_plan: PlanSpec) -> Iterator[str]:
    for name in type(own_plan).model_fields:
        old, new = getattr(own_plan, name), getattr(best_plan, name)
        if old != new and name not in _UNLISTED_FIELDS:
            yield f"{name} {new} for {old}"
    if recompute_words(own_plan) != recompute_words(best_plan):
        yield f"recompute {recompute_words(best_plan)} for {recompute_words(own_plan)}"


def _misfit_text(misfit: "Misfit", plan: PricedPlan) -> str:
    kinds = {name: value for name, value in misfit.memory.as_dict().items() if name != "total" and value}
    kinds_text = ", ".join(f"{name} {float(value) / GIB:.1f}" for name, value in kinds.items())
    if misfit.excess_bytes > 0:
        excess = (
            f"the process of pp rank {misfit.rank} needs {misfit.memory.process / GIB:.1f} GiB ({kinds_text}), and the "
            f"device shows {offered_bytes(plan.job) / GIB:.1f}: {misfit.excess_bytes / GIB:.1f} too much"
        )
    else:
        host_bytes, node = float(misfit.memory.host), link_words(plan.job.cluster).domain
        excess = (
            f"pp rank {misfit.rank} offloads {host_bytes / GIB:.1f} GiB, and its share of a {node}'s host memory is "
            f"{(host_bytes - misfit.host_excess_bytes) / GIB:.1f}: {misfit.host_excess_bytes / GIB:.1f} too much; "
            f"offload less, or set cluster.host_memory_gib if a {node} has more"
        )
    lines = [
        filled(
            f"It does not fit: {excess}; {misfit.num_ranks} of {plan.job.plan.pp} pipeline ranks need too much. "
            + (
                "The nearest plans that fit:"
                if misfit.nearest
                else "No plan fits that takes at most four times as long."
            )
        )
    ]
    lines += [
        filled(
            f"{', '.join(near.changes)}: {near.price.memory.process / GIB:.1f} GiB, {step_text(near.price.time.total)}",
            "  ",
            " " * 6,
        )
        for near in misfit.nearest
    ]
    return "\n".join(lines)
