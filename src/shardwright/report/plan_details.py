"""All that `plan --details` adds: the search, each plan in numbers, every reason, what would change the answer."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwright.config.percent import percent_text
from shardwright.config.phrase import fixed, say
from shardwright.config.units import GIB, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.memory.fit_chance import SURE
from shardwright.memory.job_memories import room_words
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.search.objectives import Objective
from shardwright.report.document import AlignedRows, Lines, Paragraph, Part, paragraph
from shardwright.report.own_plan_text import misfit_part, own_differences
from shardwright.report.plans_text import (
    job_words,
    layers_words,
    marked_words,
    misfit_words,
    plan_cost,
    step_text,
    usd_text,
)

if TYPE_CHECKING:  # these modules are loaded only when a plan is explained
    from shardwright.planner.advice.reasons import Reason
    from shardwright.planner.advice.rules import RuleOfThumb
    from shardwright.planner.advice.sensitivity import Flip

_LEAST = 5e-4  # of a step: smaller parts and differences are left out
_FAR = 3.0  # a change by a larger factor is no reason to doubt a choice
_FEW = 2  # up to so many values that do not fit have a line each


def plan_details(advice: Advice, flips: "Sequence[Flip]") -> list[Part]:
    """The details of an advice that has plans, a part for each subject. `flips` are the changes that would make the
    second plan win."""
    return list(_parts(advice, flips))


def _parts(advice: Advice, flips: "Sequence[Flip]") -> Iterator[Part]:
    tally = advice.tally
    yield paragraph(
        say(
            "The space has {plans:,} plans. Bounds excluded all but {priced:,}, which were priced; {fitting:,} of "
            "those fit in {room}{surely}. That took {seconds:.2f} s.",
            plans=tally.num_plans,
            priced=tally.num_priced,
            fitting=tally.num_fit,
            room=room_words(advice.job, shipped()),
            surely=_surely_words(advice),
            seconds=tally.seconds,
        )
    )
    if advice.own and advice.own.misfit:
        yield Lines((say("The job's own plan"), misfit_part(advice.own.misfit, advice.own.priced)))
    best = advice.plans[0]
    rows = list(_rows(advice.plans, advice.objective))
    yield AlignedRows(rows, left=(0, len(rows[0]) - 1))
    yield from (paragraph(_stages_words(number, plan)) for number, plan in enumerate(advice.plans, 1) if plan.even_s)
    yield paragraph(
        say(
            "Their steps were simulated in full, by their own orders of work; closed forms, by which they were found, "
            "say {difference}.",
            difference=_closed_words(advice.plans),
        ),
        say("Pessimistic steps are by closed forms."),
    )
    yield Lines((say("The best plan"), AlignedRows(list(_breakdown(best)))))
    if advice.binding:
        yield paragraph(say("What binds: {limit}.", limit=advice.binding))
    yield Lines((say("Why not another"), *_reason_lines(advice.reasons, float(best.time.total))))
    if len(advice.plans) > 1:
        yield paragraph(*_runner_up(advice.plans, flips))
    yield paragraph(*_caution(advice.plans))
    if advice.own:
        yield from own_differences(advice.own, best)
    yield Lines((say("Rules of thumb"), *map(_rule_line, advice.rules)))


def _stages_words(number: int, plan: PricedPlan) -> str:
    return say(
        "Plan {number} has {layers} layers: {share:.1%} faster than with layers spread evenly.",
        number=number,
        layers=layers_words(plan.job.plan.layout),
        share=(plan.even_s or 0.0) / float(plan.time.total) - 1,
    )


def _rule_line(rule: "RuleOfThumb") -> Part:
    verdict = say("agrees  ") if rule.agrees else say("DIFFERS ")
    line = say(
        "{verdict}  {rule}: {says} ({source})", verdict=verdict, rule=rule.name, says=rule.says, source=rule.source
    )
    return Paragraph((line,), "  ", " " * 12)


def _closed_words(plans: Sequence[PricedPlan]) -> str:
    """The difference between closed forms and simulated steps, as words."""
    excess = [round(float(plan.closed.total / plan.time.total) - 1, 3) for plan in plans]
    if not any(excess):
        return say("the same")
    least, most = map(_difference_words, (min(excess), max(excess)))
    if least == most:
        return least
    if not max(excess):
        return say("up to {difference}", difference=least)
    if not min(excess):
        return say("up to {difference}", difference=most)
    return say("from {least} to {most}", least=least, most=most)


def _difference_words(share: float) -> str:
    return say("{share:.1%} more", share=share) if share > 0 else say("{share:.1%} less", share=-share)


def _runner_up(plans: Sequence[PricedPlan], flips: "Sequence[Flip]") -> Iterator[str]:
    """Sentences on the second plan: how far it is behind, and what would make it as fast."""
    first, second = plans[:2]
    behind_s = float(second.time.total - first.time.total)
    if abs(behind_s) < _LEAST * float(first.time.total):
        yield say(
            "The runner-up ({plan}) takes as long, to a share of {share:.2%}.", plan=job_words(second.job), share=_LEAST
        )
        return
    yield say("The runner-up ({plan}) is {seconds} behind.", plan=job_words(second.job), seconds=seconds_text(behind_s))
    small = [flip.text for flip in flips if 1 / _FAR <= flip.factor <= _FAR]
    if second.closed.total <= first.closed.total:
        ahead_s = float(first.closed.total - second.closed.total)
        yield say("By closed forms it would be {seconds} ahead.", seconds=seconds_text(ahead_s))
    elif not flips:
        yield say("No change of bandwidth, rates or batch by up to 8 times makes it the faster one.")
    elif not small:
        yield say(
            "Bandwidth, rates or batch would have to change by more than {factor:g} times to make it as fast.",
            factor=_FAR,
        )
    else:
        changes = small[0]
        for change in small[1:]:
            changes = say("{changes}, or {change}", changes=changes, change=change)
        yield say("It would be as fast with {changes}.", changes=changes)


def _caution(plans: list[PricedPlan]) -> Iterator[str]:
    """Sentences on the order of the plans under pessimistic prices."""
    slowest = max(float(plan.cautious.total / plan.closed.total) for plan in plans)
    cautious_best = min(plans, key=lambda plan: float(plan.cautious.total / plan.job.tokens_per_step))
    yield say("A search exploits the errors of its model.")
    yield say(
        "Under pessimistic constants, each at the worst of the fits that leave a family of measured runs out, the "
        "best plan takes {step}, and no plan above takes more than {times:.2f} times what it does under the usual "
        "ones, both by closed forms.",
        step=step_text(plans[0].cautious.total),
        times=slowest,
    )
    if cautious_best is plans[0]:
        yield say("It stays the best.")
    else:
        yield say(
            "Plan {number} is then the best, with {step}.",
            number=plans.index(cautious_best) + 1,
            step=step_text(cautious_best.cautious.total),
        )


def _rows(plans: list[PricedPlan], objective: Objective) -> Iterator[list[str]]:
    yield ["", say("step"), say("pessimistic"), say("tokens/s"), "HFU", say("money"), say("plan")]
    for number, plan in enumerate(plans, 1):
        yield [
            str(number), step_text(plan.time.total), step_text(plan.cautious.total),
            f"{plan.tokens_per_s_per_device:,.0f}", percent_text(plan.time.hfu),
            usd_text(plan_cost(plan, objective).usd), marked_words(plan),
        ]  # fmt: skip


def _breakdown(plan: PricedPlan) -> Iterator[list[str]]:
    """Rows with the parts of a plan's time and, beside them, the kinds of its memory."""
    from shardwright.planner.advice.reasons import PARTS

    total = float(plan.time.total)
    times: dict[str, float] = {name: float(getattr(plan.time, part)) for part, name in PARTS.items()}
    times[say("step")] = total
    kinds = plan.memory.as_dict() | {"process": plan.memory.process}
    time_rows = [
        (name, step_text(seconds, total), percent_text(seconds / total))
        for name, seconds in times.items()
        if seconds >= _LEAST * total
    ]
    sizes = {name: float(kinds[name]) / GIB for name in kinds if name not in ("total", "host")}
    memory_rows = [(fixed(name), f"{size:.2f} GiB") for name, size in sizes.items() if size >= 0.005]
    for time_row, memory_row in itertools.zip_longest(time_rows, memory_rows):
        (part, *time_texts), (kind, size_text) = time_row or ("", "", ""), memory_row or ("", "")
        yield [_indented(part), *time_texts, _indented(kind), size_text]


def _surely_words(advice: Advice) -> str:
    """The chance from which the plans of a search fit; nothing where memory is counted, or no plan fits surely."""
    chance = advice.plans[0].fit_chance
    return say(" with a chance of at least {chance:.0%}", chance=SURE) if chance is not None and chance >= SURE else ""


def _indented(name: str) -> str:
    return say("  {name}", name=name)


def _reason_lines(reasons: "list[Reason]", step_s: float) -> Iterator[Part]:
    """A line for each value. Values of a field that do not fit and are no faster share one line if there are many."""
    for _, values in itertools.groupby(reasons, key=lambda reason: reason.field):
        of_field = list(values)
        pointless = [reason for reason in of_field if _is_refused(reason) and reason.slower_s > -_LEAST * step_s]
        pointless = [] if len(pointless) <= _FEW else pointless
        for reason in (reason for reason in of_field if reason not in pointless):
            line = say(
                "{field} {value}, not {other}: {cost}: {text}",
                field=reason.field,
                value=reason.value,
                other=reason.other,
                cost=_cost_words(reason),
                text=reason.text,
            )
            yield Paragraph((line,), "  ", " " * 6)
        if pointless:
            yield Paragraph((_pointless_words(pointless),), "  ", " " * 6)


def _is_refused(reason: "Reason") -> bool:
    """True if the other plan does not fit; one that is tight may."""
    return reason.excess_bytes > 0 and not reason.is_tight


def _cost_words(reason: "Reason") -> str:
    if reason.excess_bytes:
        return misfit_words(reason)
    seconds = seconds_text(abs(reason.slower_s))
    return (
        say("{seconds} slower", seconds=seconds) if reason.slower_s >= 0 else say("{seconds} FASTER", seconds=seconds)
    )


def _pointless_words(reasons: "Sequence[Reason]") -> str:
    """A line of values that do not fit, each with its excess in GiB."""
    values = tuple(
        say("{value} ({excess:,.1f})", value=reason.other, excess=reason.excess_bytes / GIB) for reason in reasons
    )
    return say(
        "{field} {value}, not {values}: do not fit: so many GiB more than {holder} has",
        field=reasons[0].field,
        value=reasons[0].value,
        values=values,
        holder=say("its host") if all(reason.is_host for reason in reasons) else say("the device"),
    )
