"""The answer of `plan` on one screen: the software whose seconds are predicted, the plan to take and what it costs, a
simpler one, the plans beside it, and why it is this one. `plans_text` has the rest."""

import itertools
import re
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.config.job import JobSpec
from shardwright.config.software import software_of
from shardwright.config.units import GIB, number_text, seconds_text
from shardwright.cost.failures import Goodput
from shardwright.cost.money import price_words
from shardwright.planner.advice.advice import Advice, Recommendation, SimplerPlan
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.reasons import PARTS, Reason
from shardwright.planner.advice.recommendation import TOLD_APART
from shardwright.report.fit_verdict import no_plan_text, share_text
from shardwright.report.own_plan_text import own_paragraphs
from shardwright.report.plans_text import (
    job_words,
    lacking,
    layers_words,
    marked_words,
    plan_cost,
    run_days,
    sizes_text,
    step_text,
    sure_text,
    usd_text,
)
from shardwright.report.prediction_notes import job_notes
from shardwright.report.recommendation_text import difference_words, slower_share
from shardwright.report.rendered import wide_table
from shardwright.report.software_beside import software_beside
from shardwright.report.text_columns import filled
from shardwright.simulate.closed_form import StepTime

_OTHER_SOFTWARE = "For plans of software that you run: --for megatron, --for torchtitan, or --as NAME."
_SHOWN_REASONS = 4
_SHOWN_DIFFERENCES = 2
_LEAST_PART = 0.005  # of a step
_LEAST_REASON = 5e-4  # of a step


def plan_screen(advice: Advice, notes: Sequence[str] = ()) -> list[RenderableType]:
    """An advice as parts of a screen. `notes` are about values that nobody stated."""
    parts: list[RenderableType] = [
        software_words(advice.job, [plan.time for plan in advice.plans[:1]], _OTHER_SOFTWARE),
        _heading(advice),
    ]
    parts += [filled(f"{sentence}.") for sentence in advice.left_out]
    if advice.recommendation is None:
        parts.append(Text(filled(no_plan_text(advice.job)), style="red"))
    else:
        parts += _recommended(advice, advice.recommendation)
    if advice.own:
        parts += own_paragraphs(advice.own, advice.plans)
    if advice.refused:
        parts.append(
            filled(
                f"The job's own plan ({job_words(advice.refused.job)}) is not legal here: {advice.refused.faults[0]}."
            )
        )
    remarks = [filled(f"Note: {note}.") for note in (*notes, *job_notes(advice.job))]
    if advice.recommendation:
        remarks.append(filled("--details has all reasons and the search; --toml FILE writes the job, for `train`."))
    if remarks:
        parts.append("\n".join(remarks))
    return parts


def software_words(job: JobSpec, times: Sequence[StepTime], other_software: str) -> str:
    """The software that predictions of steps are about, and how far they may be off, the least sure of them; of this
    runtime also how to ask for `other_software`."""
    software = software_of(job.cluster.software)
    error = ""
    if times:
        low = min(float(time.low) / float(time.total) for time in times)
        high = max(float(time.high) / float(time.total) for time in times)
        error = f" Four of five runs like it, to which nothing was fitted, took {low:.2f} to {high:.2f} times as long."
    if not software.is_own:
        return filled(f"Predicted, not measured: steps of {software.name}.{error}")
    return filled(
        f"Predicted, not measured: steps of this runtime, Shardwright's own, which has not run on several devices yet."
        f"{error} {other_software}"
    )


def _heading(advice: Advice) -> str:
    job, cluster = advice.job, advice.job.cluster
    return filled(
        f"{job.model.name} on {cluster.num_devices:,} {cluster.device}, {job.batch.global_batch_size:,} sequences of "
        f"{job.model.sequence:,} tokens a step, computed in {job.precision.product_number}; "
        f"{advice.tally.num_plans:,} plans searched in {advice.tally.seconds:.1f} s"
    )


def _recommended(advice: Advice, recommendation: Recommendation) -> Iterator[RenderableType]:
    plan = recommendation.plan
    yield _plan_lines(advice, plan)
    if recommendation.simpler:
        yield _simpler_words(advice, plan, recommendation.simpler)
    beside = software_beside(advice.plans)
    yield Group(plans_table(advice), beside) if beside else plans_table(advice)
    if missing := dict.fromkeys(word for plan in advice.plans for word in lacking(plan)):
        yield filled(f"* {advice.job.cluster.software} lacks {', '.join(missing)}, which this runtime has.")
    if advice.tried:
        yield sizes_text(advice)
    yield _parts_words(plan)
    if reasons := list(nearest_reasons(advice.reasons, float(plan.time.total))):
        yield _reasons_table(reasons)


def _plan_lines(advice: Advice, plan: PricedPlan) -> Text:
    layers = f", layers {layers_words(plan.job.plan.layout)}" if plan.job.plan.layout else ""
    lines = Text()
    lines.append(filled(f"Recommended: {job_words(plan.job)}{layers}", hang="  "), style="bold green")
    time = plan.time
    details = [
        f"{step_text(time.total)} a step, {plan.tokens_per_s_per_device:,.0f} tokens/s/device, MFU {time.mfu:.1%}, "
        f"{share_text(plan.memory.process, plan.job)}.",
        _cost_words(advice, plan),
    ]
    for line in details:
        lines.append("\n" + filled(line, "  ", "  "))
    return lines


def _cost_words(advice: Advice, plan: PricedPlan) -> str:
    objective = advice.objective
    tokens = f"{objective.run_tokens:.3g} tokens".replace("e+", "e")
    words = f"{tokens} take {number_text(run_days(plan, objective))} days"
    money, goodput = plan_cost(plan, objective).usd, objective.goodput(plan.job)
    failures = "without time lost to failures" if goodput is None else _failure_words(goodput)
    if money is None:
        return f"{words}, {failures}; no price of {plan.job.cluster.device} is known (--usd-per-hour)."
    return f"{words} and {usd_text(money)}, {price_words(plan.job.cluster)}, {failures}."


def _failure_words(goodput: Goodput) -> str:
    """The shares of a run's time that do not train, and the best interval of checkpoints."""
    lost = [("checkpoints", goodput.checkpoints), ("lost work", goodput.lost_work), ("restarts", goodput.restarts)]
    shares = ", ".join(f"{name} {float(share):.1%}" for name, share in lost)
    return (
        f"of which {float(goodput.training):.1%} trains, with a checkpoint every "
        f"{seconds_text(float(goodput.interval_s))} ({shares})"
    )


def _simpler_words(advice: Advice, plan: PricedPlan, simpler: SimplerPlan) -> Text:
    objective = advice.objective
    costs = [f"{slower_share(simpler.plan, plan):.1%} slower"]
    own_usd, usd = plan_cost(plan, objective).usd, plan_cost(simpler.plan, objective).usd
    if own_usd is not None and usd is not None:
        costs.append(f"{usd_text(float(usd) - float(own_usd))} more")
    sure = f"{sure_text(simpler.confidence)} sure, told apart from {TOLD_APART:.0%}"
    differences = "; ".join(itertools.islice(difference_words(simpler, plan), _SHOWN_DIFFERENCES))
    words = f"Simpler: {job_words(simpler.plan.job)}: {' and '.join(costs)} ({sure}): {differences}."
    return Text(filled(words, hang="  "), style="cyan")


def plans_table(advice: Advice) -> Table:
    """The best plans, the recommended one first."""
    objective = advice.objective
    rows = [
        [
            str(number),
            step_text(plan.time.total),
            sure_text(plan.first_is_faster),
            f"{plan.time.mfu:.1%}",
            f"{plan.memory.process / GIB:.1f}",
            number_text(run_days(plan, objective)),
            usd_text(plan_cost(plan, objective).usd),
            marked_words(plan),
        ]
        for number, plan in enumerate(advice.plans, 1)
    ]
    return wide_table(("", "step", "1 faster", "MFU", "GiB", "days", "money", "plan"), rows, is_first_best=True)


def _parts_words(plan: PricedPlan) -> str:
    time, total = plan.time, float(plan.time.total)
    shares = sorted(((float(getattr(time, part)) / total, name) for part, name in PARTS.items()), reverse=True)
    return filled(
        "Of the step: " + ", ".join(f"{name} {share:.1%}" for share, name in shares if share >= _LEAST_PART) + ".",
        hang="  ",
    )


def nearest_reasons(reasons: list[Reason], step_s: float) -> Iterator[Reason]:
    """For each field the nearest alternative that is slower, or else the first that does not fit."""
    for _, values in itertools.groupby(reasons, key=lambda reason: reason.field):
        worse = [reason for reason in values if reason.excess_bytes > 0 or reason.slower_s > _LEAST_REASON * step_s]
        yield from worse[:1]


def _reasons_table(reasons: list[Reason]) -> Table:
    nearest = sorted(reasons, key=lambda reason: (reason.excess_bytes > 0, reason.slower_s))[:_SHOWN_REASONS]
    rows = [
        [
            f"{reason.field} {reason.value}, not {reason.other}",
            "does not fit" if reason.excess_bytes else seconds_text(reason.slower_s),
            _decisive_words(reason),
        ]
        for reason in nearest
    ]
    return wide_table(("why", "slower by", "because"), rows, left=(0,))


def _decisive_words(reason: Reason) -> str:
    """The part of a reason that decides most."""
    return re.split(r" > | \+ | \(", reason.text)[0]
