"""The best plans as text that says why, and as JSON."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import order_words
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.config.units import GIB, number_text, seconds_text
from shardwright.cost.calibration import device_of, shipped
from shardwright.cost.money import Money, step_money
from shardwright.memory.job_memories import room_words
from shardwright.planner.advice.advice import Advice, OwnPlan
from shardwright.planner.advice.neighbours import recompute_words
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.own_plan import ramp_extra_s
from shardwright.report.fit_verdict import no_plan_text
from shardwright.report.prediction_notes import job_notes
from shardwright.report.text_columns import aligned

if TYPE_CHECKING:  # these modules are loaded only when a plan is explained
    from shardwright.planner.advice.reasons import Reason
    from shardwright.planner.advice.repair import Misfit
    from shardwright.planner.search.sample import Standing

_WIDTH = 118
_LEAST = 5e-4  # of a step: smaller parts and differences are left out
_FAR = 3.0  # a change by a larger factor is no reason to doubt a choice
_FEW = 2  # up to so many values that do not fit have a line each


def plan_dict(plan: PricedPlan, run_tokens: float) -> dict[str, Any]:
    """One plan of `--json`: all fields of the plan, seconds, bytes, and US dollars (null if the price is unknown).
    `run` is a run of `run_tokens` tokens."""
    time, memory = asdict(plan.time), plan.memory.as_dict()
    return {
        "plan": plan.job.plan.model_dump(),
        "float8": plan.job.precision.float8,
        "global_batch_size": plan.job.batch.global_batch_size,
        "num_devices": plan.job.plan.world,
        "step_s": float(plan.time.total),
        "closed_form_step_s": float(plan.closed.total),
        "pessimistic_step_s": float(plan.cautious.total),
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "mfu": float(plan.time.mfu),
        "hfu": float(plan.time.hfu),
        "cost_per_step": plan.money.usd,
        "run": {"tokens": run_tokens, "days": _days(plan, run_tokens), **asdict(_money(plan, run_tokens))},
        "memory": {name: float(value) for name, value in memory.items()} | {"process": float(plan.memory.process)},
        "time": {name: float(value) for name, value in time.items() if name not in ("mfu", "hfu")},
        "fits": plan.fits,
        "even_stages_step_s": plan.even_s,
        "software_lacks": list(_lacks(plan)),
    }


def _steps(plan: PricedPlan, tokens: float) -> float:
    """The number of full-batch steps that take as long as `tokens` tokens; a batch that grows is smaller at first."""
    full_s = float(plan.time.total)
    return tokens / plan.job.tokens_per_step + ramp_extra_s(plan.job, full_s) / full_s


def _days(plan: PricedPlan, tokens: float) -> float:
    return _steps(plan, tokens) * float(plan.time.total) / 86400.0


def _money(plan: PricedPlan, tokens: float) -> Money:
    """The price of a run, without time lost to failures."""
    return plan.money.times(_steps(plan, tokens))


def _lacks(plan: PricedPlan) -> tuple[str, ...]:
    return missing_features(software_of(plan.job.cluster.software), plan.job)


def sure_text(share: float | None) -> str:
    """A confidence as a percentage, rounded down: one below the bound that tells plans apart must not read as the
    bound. Empty for the first plan, which has none."""
    return "" if share is None else f"{math.floor(100 * share + 1e-9)}%"


def plan_words(plan: PlanSpec) -> str:
    """A plan in one line: its degrees, and the other fields that differ from their defaults."""
    axes = ["tp", "pp", "dp", *(axis for axis in ("cp", "ep") if getattr(plan, axis) > 1)]
    words = [f"{axis} {getattr(plan, axis)}" for axis in axes]
    if plan.block < plan.stage_ranks:
        words.append(f"order {order_words(plan)}")
    if plan.pp > 1:
        words.append(plan.schedule + (f" v {plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    words.append(f"mb {plan.microbatch_size}")
    words.append(f"zero {plan.zero}" + (f" over {plan.zero_ranks}" if plan.zero_ranks else ""))
    if plan.recompute != "none":
        words.append(f"recompute {recompute_words(plan)}")
    words += [
        name for name in ("sequence_parallel", "offload_parameters", "offload_activations") if getattr(plan, name)
    ]
    if plan.offload_optimizer:
        share = f" {plan.offload_optimizer:g}" if plan.offload_optimizer < 1 else ""
        words.append(f"offload_optimizer{share}")
    if plan.cp > 1:
        words.append(plan.cp_method)
    if plan.dispatch != "direct":
        words.append(plan.dispatch)
    return ", ".join(words)


def job_words(job: JobSpec) -> str:
    """A job's plan in one line, with its fp8 recipe if it has one."""
    recipe = job.precision.float8
    return plan_words(job.plan) + (f", fp8 {recipe}" if recipe != "none" else "")


def layers_words(layout: Sequence[int]) -> str:
    """Layers by stage, with equal neighbours joined: "7, 14 x 8, 7"."""
    runs = [(layers, len(list(stages))) for layers, stages in itertools.groupby(layout)]
    return ", ".join(f"{count} x {layers}" if count > 1 else str(layers) for layers, count in runs)


def plans_text(advice: Advice) -> str:
    """An advice as text, one paragraph for each subject."""
    return "\n\n".join(_paragraphs(advice))


def _paragraphs(advice: Advice) -> Iterator[str]:
    job, tally = advice.job, advice.tally
    cluster = job.cluster
    yield (
        f"{job.model.name} on {cluster.num_devices:,} {cluster.device} ({cluster.name}), "
        f"{job.batch.global_batch_size:,} sequences of {job.model.sequence:,} tokens a step"
    )
    yield _filled(
        f"The space has {tally.num_plans:,} plans. Bounds excluded all but {tally.num_priced:,}, which were priced; "
        f"{tally.num_fit:,} of those fit in {room_words(job, shipped())}. That took {tally.seconds:.2f} s."
    )
    yield from (_filled(f"{sentence}.") for sentence in advice.left_out)
    if not advice.plans:
        yield _filled(no_plan_text(job))
    else:
        yield from _best(advice)
    if advice.own:
        yield from _own_paragraphs(advice.own, advice.plans)
    if advice.refused:
        yield _filled(
            f"The job's own plan ({job_words(advice.refused.job)}) is not legal here: "
            f"{'; '.join(advice.refused.faults)}."
        )
    yield from (_filled(f"Note: {note}.") for note in job_notes(job))


def _best(advice: Advice) -> Iterator[str]:
    best = advice.plans[0]
    rows = list(_rows(advice.plans, advice.objective.run_tokens))
    yield aligned(rows, left=(0, len(rows[0]) - 1))
    tokens = f"{advice.objective.run_tokens:.3g}".replace("e+", "e")
    yield _filled(f"Days and money are of {tokens} tokens (--tokens), without time lost to failures.")
    if advice.tried:
        yield _tried(advice)
    yield from (
        _filled(
            f"Plan {number} has stages of {layers_words(plan.job.plan.layout)} layers: "
            f"{plan.even_s / float(plan.time.total) - 1:.1%} faster than with layers spread evenly."
        )
        for number, plan in enumerate(advice.plans, 1)
        if plan.even_s
    )
    missing = dict.fromkeys(word for plan in advice.plans for word in _lacks(plan))
    if missing:
        yield _filled(f"* {advice.job.cluster.software} lacks {', '.join(missing)}, which this runtime has.")
    yield _filled(
        "Their steps were simulated in full, by their own orders of work; closed forms, by which they were found, say "
        f"{_closed_words(advice.plans)}. Pessimistic steps are by closed forms."
    )
    yield "The best plan\n" + aligned(list(_breakdown(best)))
    if advice.binding:
        yield _filled(f"What binds: {advice.binding}.")
    yield "Why not another\n" + "\n".join(_reason_lines(advice.reasons, float(best.time.total)))
    if len(advice.plans) > 1:
        yield _filled(_runner_up(advice))
    yield _filled(_caution(advice.plans))
    yield "Rules of thumb\n" + "\n".join(
        _filled(f"{'agrees  ' if rule.agrees else 'DIFFERS '}  {rule.name}: {rule.says} ({rule.source})", hang=12)
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
        f"leave a family of measured runs out, the best plan takes {_step(plans[0].cautious.total)}, and no plan above "
        f"takes more than {slowest:.2f} times what it does under the usual ones, both by closed forms. "
    )
    if cautious_best is plans[0]:
        return text + "It stays the best."
    return text + f"Plan {plans.index(cautious_best) + 1} is then the best, with {_step(cautious_best.cautious.total)}."


def _filled(text: str, hang: int = 0) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  " if hang else "", subsequent_indent=" " * hang)


def _tried(advice: Advice) -> str:
    """A table of the sizes of the cluster that the objective compared; the chosen size is marked."""
    tokens, chosen = advice.objective.run_tokens, advice.job.cluster.num_devices
    rows = [["devices", "days", "device-hours", "money", ""]]
    for size in advice.tried:
        note = "chosen" if size.num_devices == chosen else "" if advice.objective.in_time(size.token_s) else "too slow"
        if size.token_s == math.inf:
            rows.append([f"{size.num_devices:,}", "", "", "", "no plan fits"])
            continue
        money = step_money(advice.job.cluster, tokens * size.token_s, size.num_devices)
        days = tokens * size.token_s / 86400.0
        rows.append([f"{size.num_devices:,}", number_text(days), f"{money.device_hours:,.0f}", _usd(money.usd), note])
    return "The best plan at each size that was compared\n" + aligned(rows, left=(4,))


def _step(seconds: Any, of_step: float | None = None) -> str:
    """Seconds as "12.345 s", or as "12.34 ms" if the step is shorter than a second, so that plans compare easily."""
    step_s = float(seconds) if of_step is None else of_step
    return f"{float(seconds):.3f} s" if step_s >= 1 else f"{1e3 * float(seconds):.2f} ms"


def _usd(usd: Any) -> str:
    """US dollars as "unknown", "$0.36" or "$1,234"."""
    return "unknown" if usd is None else f"${float(usd):,.0f}" if usd >= 100 else f"${float(usd):,.2f}"


def _rows(plans: list[PricedPlan], run_tokens: float) -> Iterator[list[str]]:
    heading = "step", "first faster", "pessimistic", "tokens/s/device", "MFU", "HFU", "memory", "days", "money", "plan"
    yield ["", *heading]
    for number, plan in enumerate(plans, 1):
        yield [
            str(number), _step(plan.time.total), sure_text(plan.first_is_faster), _step(plan.cautious.total),
            f"{plan.tokens_per_s_per_device:,.0f}", f"{plan.time.mfu:.1%}", f"{plan.time.hfu:.1%}",
            f"{plan.memory.process / GIB:.1f} GiB", number_text(_days(plan, run_tokens)),
            _usd(_money(plan, run_tokens).usd), job_words(plan.job) + " *" * bool(_lacks(plan)),
        ]  # fmt: skip


def _breakdown(plan: PricedPlan) -> Iterator[list[str]]:
    """Rows with the parts of a plan's time and, beside them, the kinds of its memory."""
    from shardwright.planner.advice.reasons import PARTS

    total = float(plan.time.total)
    times = {name: float(getattr(plan.time, part)) for part, name in PARTS.items()} | {"step": total}
    kinds = plan.memory.as_dict() | {"process": plan.memory.process}
    time_rows = [
        (name, _step(seconds, total), f"{seconds / total:.1%}")
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
            yield _filled(f"{field} {reason.value}, not {reason.other}: {cost}: {reason.text}", hang=6)
        if pointless:
            values_text = ", ".join(f"{reason.other} ({reason.excess_bytes / GIB:,.1f})" for reason in pointless)
            holder = "its host" if all(reason.is_host for reason in pointless) else "the device"
            text = f"{field} {pointless[0].value}, not {values_text}: do not fit: so many GiB more than {holder} has"
            yield _filled(text, hang=6)


def _own_paragraphs(own_plan: OwnPlan, plans: list[PricedPlan]) -> Iterator[str]:
    """The job's own plan: its distance from the best plan, its standing, and the reason why it does not fit, if so."""
    own_priced, standing = own_plan.priced, own_plan.standing
    text = f"The job's own plan ({job_words(own_priced.job)}) takes {_step(own_priced.time.total)}"
    if plans:
        best_token_s = plans[0].time.total / plans[0].job.tokens_per_step
        excess = float(own_priced.time.total / own_priced.job.tokens_per_step / best_token_s) - 1
        if abs(excess) < _LEAST:
            text += ", as long as the best"
        else:
            text += f", {excess:.1%} more than the best" if excess >= 0 else f", {-excess:.1%} less than the best found"
    text += f", at {own_priced.memory.process / GIB:.1f} GiB. {_standing_text(standing)}"
    if own_plan.misfit is None and plans and standing.share_faster > 0.03:
        changes = ", ".join(_changes(own_priced.job.plan, plans[0].job.plan))
        text += (
            " What its authors knew and this model does not (software that lacks a schedule, limits of numerics or of "
            f"operations, a device that is shared) would have to be worth that much: the best plan has {changes}."
        )
    yield _filled(text)
    if own_plan.misfit:
        yield _misfit_text(own_plan.misfit, own_priced)


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
    room_gib = device_of(plan.job.cluster.device).memory_gib
    if misfit.excess_bytes > 0:
        excess = (
            f"pp rank {misfit.rank} needs {misfit.memory.process / GIB:.1f} GiB ({kinds_text}), and the device has "
            f"{room_gib:g}: {misfit.excess_bytes / GIB:.1f} too much"
        )
    else:
        host_bytes, node = float(misfit.memory.host), link_words(plan.job.cluster).domain
        excess = (
            f"pp rank {misfit.rank} offloads {host_bytes / GIB:.1f} GiB, and its share of a {node}'s host memory is "
            f"{(host_bytes - misfit.host_excess_bytes) / GIB:.1f}: {misfit.host_excess_bytes / GIB:.1f} too much; "
            f"offload less, or set cluster.host_memory_gib if a {node} has more"
        )
    lines = [
        _filled(
            f"It does not fit: {excess}; {misfit.num_ranks} of {plan.job.plan.pp} pipeline ranks need too much. "
            + (
                "The nearest plans that fit:"
                if misfit.nearest
                else "No plan fits that takes at most four times as long."
            )
        )
    ]
    lines += [
        _filled(
            f"{', '.join(near.changes)}: {near.price.memory.process / GIB:.1f} GiB, {_step(near.price.time.total)}",
            hang=6,
        )
        for near in misfit.nearest
    ]
    return "\n".join(lines)
