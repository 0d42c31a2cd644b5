"""All that `plan --details` adds: the search, each plan in numbers, every reason, what would change the answer."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.config.units import GIB, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.memory.job_memories import room_words
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.search.objectives import Objective
from shardwright.report.own_plan_text import own_differences
from shardwright.report.plans_text import job_words, layers_words, marked_words, plan_cost, step_text, usd_text
from shardwright.report.text_columns import aligned, filled

if TYPE_CHECKING:  # these modules are loaded only when a plan is explained
    from shardwright.planner.advice.reasons import Reason

_LEAST = 5e-4  # of a step: smaller parts and differences are left out
_FAR = 3.0  # a change by a larger factor is no reason to doubt a choice
_FEW = 2  # up to so many values that do not fit have a line each


def plan_details(advice: Advice) -> str:
    """The details of an advice that has plans, one paragraph for each subject."""
    return "\n\n".join(_paragraphs(advice))


def _paragraphs(advice: Advice) -> Iterator[str]:
    tally = advice.tally
    yield filled(
        f"The space has {tally.num_plans:,} plans. Bounds excluded all but {tally.num_priced:,}, which were priced; "
        f"{tally.num_fit:,} of those fit in {room_words(advice.job, shipped())}. That took {tally.seconds:.2f} s."
    )
    best = advice.plans[0]
    rows = list(_rows(advice.plans, advice.objective))
    yield aligned(rows, left=(0, len(rows[0]) - 1))
    yield from (
        filled(
            f"Plan {number} has stages of {layers_words(plan.job.plan.layout)} layers: "
            f"{plan.even_s / float(plan.time.total) - 1:.1%} faster than with layers spread evenly."
        )
        for number, plan in enumerate(advice.plans, 1)
        if plan.even_s
    )
    yield filled(
        "Their steps were simulated in full, by their own orders of work; closed forms, by which they were found, say "
        f"{_closed_words(advice.plans)}. Pessimistic steps are by closed forms."
    )
    yield "The best plan\n" + aligned(list(_breakdown(best)))
    if advice.binding:
        yield filled(f"What binds: {advice.binding}.")
    yield "Why not another\n" + "\n".join(_reason_lines(advice.reasons, float(best.time.total)))
    if len(advice.plans) > 1:
        yield filled(_runner_up(advice))
    yield filled(_caution(advice.plans))
    if advice.own:
        yield from own_differences(advice.own, best)
    yield "Rules of thumb\n" + "\n".join(
        filled(f"{'agrees  ' if rule.agrees else 'DIFFERS '}  {rule.name}: {rule.says} ({rule.source})", "  ", " " * 12)
        for rule in advice.rules
    )


def _closed_words(plans: list[PricedPlan]) -> str:
    """The difference between closed forms and simulated steps, as words."""
    excess = [round(float(plan.closed.total / plan.time.total) - 1, 3) for plan in plans]
    least, most = (f"{abs(share):.1%} {'more' if share > 0 else 'less'}" for share in (min(excess), max(excess)))
    if not any(excess):
        return "the same"
    return (
        least
        if least == most
        else f"up to {least}"
        if not max(excess)
        else f"up to {most}"
        if not min(excess)
        else (f"from {least} to {most}")
    )


def _runner_up(advice: Advice) -> str:
    second = advice.plans[1]
    behind_s = float(second.time.total - advice.plans[0].time.total)
    if abs(behind_s) < _LEAST * float(advice.plans[0].time.total):
        return f"The runner-up ({job_words(second.job)}) takes as long, to a share of {_LEAST:.2%}."
    words = f"The runner-up ({job_words(second.job)}) is {seconds_text(behind_s)} behind. "
    if second.closed.total <= advice.plans[0].closed.total:
        ahead_s = float(advice.plans[0].closed.total - second.closed.total)
        return words + f"By closed forms it would be {seconds_text(ahead_s)} ahead."
    if not advice.flips:
        return words + "No change of bandwidth, rates or batch by up to 8 times makes it the faster one."
    small = [flip.text for flip in advice.flips if 1 / _FAR <= flip.factor <= _FAR]
    if not small:
        return words + f"Bandwidth, rates or batch would have to change by more than {_FAR:g} times to make it as fast."
    return words + "It would be as fast with " + ", or ".join(small) + "."


def _caution(plans: list[PricedPlan]) -> str:
    """The order of the plans under pessimistic prices."""
    slowest = max(float(plan.cautious.total / plan.closed.total) for plan in plans)
    cautious_best = min(plans, key=lambda plan: float(plan.cautious.total / plan.job.tokens_per_step))
    text = (
        "A search exploits the errors of its model. Under pessimistic constants, each at the worst of the fits that "
        f"leave a family of measured runs out, the best plan takes {step_text(plans[0].cautious.total)}, and no plan "
        f"above takes more than {slowest:.2f} times what it does under the usual ones, both by closed forms. "
    )
    if cautious_best is plans[0]:
        return text + "It stays the best."
    return (
        text
        + f"Plan {plans.index(cautious_best) + 1} is then the best, with {step_text(cautious_best.cautious.total)}."
    )


def _rows(plans: list[PricedPlan], objective: Objective) -> Iterator[list[str]]:
    yield ["", "step", "pessimistic", "tokens/s", "HFU", "money", "plan"]
    for number, plan in enumerate(plans, 1):
        yield [
            str(number), step_text(plan.time.total), step_text(plan.cautious.total),
            f"{plan.tokens_per_s_per_device:,.0f}", f"{plan.time.hfu:.1%}",
            usd_text(plan_cost(plan, objective).usd), marked_words(plan),
        ]  # fmt: skip


def _breakdown(plan: PricedPlan) -> Iterator[list[str]]:
    """Rows with the parts of a plan's time and, beside them, the kinds of its memory."""
    from shardwright.planner.advice.reasons import PARTS

    total = float(plan.time.total)
    times = {name: float(getattr(plan.time, part)) for part, name in PARTS.items()} | {"step": total}
    kinds = plan.memory.as_dict() | {"process": plan.memory.process}
    time_rows = [
        (name, step_text(seconds, total), f"{seconds / total:.1%}")
        for name, seconds in times.items()
        if seconds >= _LEAST * total
    ]
    sizes = {name: float(kinds[name]) / GIB for name in kinds if name not in ("total", "host")}
    memory_rows = [(name, f"{size:.2f} GiB") for name, size in sizes.items() if size >= 0.005]
    for time_row, memory_row in itertools.zip_longest(time_rows, memory_rows):
        (part, *time_texts), (kind, size_text) = time_row or ("", "", ""), memory_row or ("", "")
        yield ["  " + part, *time_texts, "  " + kind, size_text]


def _reason_lines(reasons: "list[Reason]", step_s: float) -> Iterator[str]:
    """A line for each value. Values of a field that do not fit and are no faster share one line if there are many."""
    for field, values in itertools.groupby(reasons, key=lambda reason: reason.field):
        of_field = list(values)
        pointless = [reason for reason in of_field if reason.excess_bytes > 0 and reason.slower_s > -_LEAST * step_s]
        pointless = [] if len(pointless) <= _FEW else pointless
        for reason in (reason for reason in of_field if reason not in pointless):
            if reason.excess_bytes:
                cost = "does not fit"
            else:
                cost = f"{seconds_text(abs(reason.slower_s))} {'slower' if reason.slower_s >= 0 else 'FASTER'}"
            yield filled(f"{field} {reason.value}, not {reason.other}: {cost}: {reason.text}", "  ", " " * 6)
        if pointless:
            values_text = ", ".join(f"{reason.other} ({reason.excess_bytes / GIB:,.1f})" for reason in pointless)
            holder = "its host" if all(reason.is_host for reason in pointless) else "the device"
            text = f"{field} {pointless[0].value}, not {values_text}: do not fit: so many GiB more than {holder} has"
            yield filled(text, "  ", " " * 6)
