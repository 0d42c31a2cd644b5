"""The job's own plan beside the best one: how far it is off, its standing, and why it does not fit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.config.link_words import link_words
from shardwright.config.phrase import fixed, say
from shardwright.config.plan import PlanSpec
from shardwright.config.units import GIB
from shardwright.planner.advice.advice import OwnPlan
from shardwright.planner.advice.neighbours import recompute_words
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.report.document import Lines, Paragraph, Part, paragraph
from shardwright.report.fit_verdict import kinds_words, offered_bytes
from shardwright.report.plans_text import job_words, lacking, step_text

if TYPE_CHECKING:  # these modules are loaded only when a plan is explained
    from shardwright.planner.advice.repair import Misfit
    from shardwright.planner.search.sample import Standing

_MANY_FASTER = 0.03  # a share of the plans of the space
_LEAST = 5e-4  # of a step: smaller parts and differences are left out


def own_paragraph(own_plan: OwnPlan, plans: list[PricedPlan]) -> Part:
    """The job's own plan: its distance from the best plan, its standing, and by how much it does not fit, if so."""
    own_priced = own_plan.priced
    takes = say(
        "The job's own plan ({plan}) takes {step}{distance}, at {process:.1f} GiB.",
        plan=job_words(own_priced.job),
        step=step_text(own_priced.time.total),
        distance=_distance(own_priced, plans),
        process=own_priced.memory.process / GIB,
    )
    return paragraph(
        takes, _lacking_words(own_priced), _standing_text(own_plan.standing), _misfit_words(own_plan.misfit)
    )


def _lacking_words(own_priced: PricedPlan) -> str:
    """Why the space of plans has no plan like the job's own: the features of it that the software lacks."""
    missing = lacking(own_priced)
    if not missing:
        return ""
    software = own_priced.job.cluster.software
    return say(
        "It needs {missing}, which {software} lacks, so it is not among the plans searched.",
        missing=missing,
        software=software,
    )


def _misfit_words(misfit: "Misfit | None") -> str:
    """The excess of the fullest rank, of which `misfit_part` has the rest; empty for a plan that fits."""
    if misfit is None:
        return ""
    return say(
        "It does not fit: pp rank {rank} needs {excess:.1f} GiB too much.",
        rank=misfit.rank,
        excess=max(misfit.excess_bytes, misfit.host_excess_bytes) / GIB,
    )


def _distance(own_priced: PricedPlan, plans: list[PricedPlan]) -> str:
    """The ratio by which a token takes longer than with the best plan; empty if no plan fits."""
    if not plans:
        return ""
    best_token_s = plans[0].time.total / plans[0].job.tokens_per_step
    excess = float(own_priced.time.total / own_priced.job.tokens_per_step / best_token_s) - 1
    if abs(excess) < _LEAST:
        return say(", as long as the best")
    if excess < 0:
        return say(", {share:.1%} less than the best found", share=-excess)
    return say(", {share:.1%} more than the best", share=excess)


def own_differences(own_plan: OwnPlan, best: PricedPlan) -> Iterator[Part]:
    """A paragraph on what sets the job's own plan apart from a best plan that is much faster."""
    if own_plan.misfit is None and own_plan.standing.share_faster > _MANY_FASTER:
        yield paragraph(
            say(
                "What the authors of the job's own plan knew and this model does not (software that lacks a schedule, "
                "limits of numerics or of operations, a device that is shared) would have to be worth that much: the "
                "best plan has {changes}.",
                changes=tuple(_changes(own_plan.priced.job.plan, best.job.plan)),
            )
        )


def _standing_text(sample: "Standing") -> str:
    if not sample.num_fit:
        return say("None of {drawn:,} plans drawn from the space fits.", drawn=sample.num_drawn)
    faster = (
        say("{share:.1%} are", share=sample.share_faster) if sample.share_faster >= _LEAST else say("hardly one is")
    )
    return say(
        "Of {fitting:,} plans that fit, among {drawn:,} drawn from the space, {faster} faster.",
        fitting=sample.num_fit,
        drawn=sample.num_drawn,
        faster=faster if sample.share_faster else say("none is"),
    )


# Fields that other words describe, and `fallback`, which has plans for other numbers of ranks.
_UNLISTED_FIELDS = ("layout", "recompute", "recompute_operators", "recompute_every", "fallback")


def _changes(own_plan: PlanSpec, best_plan: PlanSpec) -> Iterator[str]:
    for name in type(own_plan).model_fields:
        old, new = getattr(own_plan, name), getattr(best_plan, name)
        if old != new and name not in _UNLISTED_FIELDS:
            yield say("{field} {value} for {other}", field=name, value=new, other=old)
    if recompute_words(own_plan) != recompute_words(best_plan):
        new, old = recompute_words(best_plan), recompute_words(own_plan)
        yield say("{field} {value} for {other}", field="recompute", value=new, other=old)


def misfit_part(misfit: "Misfit", plan: PricedPlan) -> Part:
    """The rank that needs most, by how much it is too much, and the nearest plans that fit."""
    excess = _device_excess(misfit, plan) if misfit.excess_bytes > 0 else _host_excess(misfit, plan)
    summary = say(
        "It does not fit: {excess}; {count} of {pp} pipeline ranks need too much.",
        excess=excess,
        count=misfit.num_ranks,
        pp=plan.job.plan.pp,
    )
    nearest = (
        say("The nearest plans that fit:")
        if misfit.nearest
        else say("No plan fits that takes at most four times as long.")
    )
    lines = [
        say(
            "{changes}: {process:.1f} GiB, {step}",
            changes=near.changes,
            process=near.price.memory.process / GIB,
            step=step_text(near.price.time.total),
        )
        for near in misfit.nearest
    ]
    return Lines((paragraph(summary, nearest), *(Paragraph((line,), "  ", " " * 6) for line in lines)))


def _device_excess(misfit: "Misfit", plan: PricedPlan) -> str:
    return say(
        "the process of pp rank {rank} needs {needed:.1f} GiB ({kinds}), and the device shows {offered:.1f}: "
        "{excess:.1f} too much",
        rank=misfit.rank,
        needed=misfit.memory.process / GIB,
        kinds=kinds_words(misfit.memory),
        offered=offered_bytes(plan.job) / GIB,
        excess=misfit.excess_bytes / GIB,
    )


def _host_excess(misfit: "Misfit", plan: PricedPlan) -> str:
    host_bytes = float(misfit.memory.host)
    return say(
        "pp rank {rank} offloads {hosted:.1f} GiB, and its share of a {domain}'s host memory is {share:.1f}: "
        "{excess:.1f} too much; offload less, or set cluster.host_memory_gib if a {domain} has more",
        rank=misfit.rank,
        hosted=host_bytes / GIB,
        domain=fixed(link_words(plan.job.cluster).domain),
        share=(host_bytes - misfit.host_excess_bytes) / GIB,
        excess=misfit.host_excess_bytes / GIB,
    )
