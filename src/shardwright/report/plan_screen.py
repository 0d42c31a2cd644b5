"""The answer of `plan` on one screen: the software whose seconds are predicted, the plan to take and what it costs, a
simpler one, the plans beside it, and why it is this one. `plans_text` has the rest."""

import itertools
from collections.abc import Iterator, Sequence

from shardwright.config.job import JobSpec
from shardwright.config.percent import percent_text
from shardwright.config.phrase import each, note_phrase, say
from shardwright.config.text_columns import terminal_width
from shardwright.config.units import DAY_S, GIB, counted_phrase, days_column, number_text, seconds_text, tokens_text
from shardwright.cost.failures import Goodput
from shardwright.cost.money import price_words
from shardwright.planner.advice.advice import Advice, Recommendation, SimplerPlan
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.reasons import PARTS, Reason
from shardwright.planner.advice.rules import place_of_state
from shardwright.planner.search.objectives import Objective
from shardwright.report.document import Lines, Paragraph, Part, paragraph
from shardwright.report.fit_verdict import no_plan_text, share_text
from shardwright.report.own_plan_text import misfit_part, own_paragraph
from shardwright.report.plans_text import (
    changed_words,
    job_words,
    lacking,
    layers_words,
    marked_words,
    misfit_words,
    model_name,
    plan_cost,
    run_days,
    sizes_part,
    step_text,
    sure_text,
    usd_text,
)
from shardwright.report.prediction_notes import job_notes
from shardwright.report.recommendation_text import difference_words, slower_share
from shardwright.report.rendered import ColouredParts, ScreenPart, WideRows
from shardwright.report.software_beside import software_beside
from shardwright.report.step_cost import software_part

_OTHER_SOFTWARE = say("For plans of software that you run: --for megatron, --for torchtitan, or --as NAME.")
SCREEN_LINES = 40
_SCREEN_COLUMNS = 100  # with so many, a screen has no more lines
_MOST_REASONS = 4
_LEAST_REASONS = 2  # where there are fewer columns
_SHOWN_DIFFERENCES = 2
_LEAST_PART = 0.005  # of a step
_LEAST_REST = 0.0005
_REST = "other"  # the part of a step without a name
_LEAST_REASON = 5e-4  # of a step
_SAME_RUN = 0.01  # runs whose tokens differ by less are shown as one


def plan_screen(advice: Advice, notes: Sequence[str] = ()) -> list[ScreenPart]:
    """An advice as parts of a screen. `notes` are about values that nobody stated."""
    return next(plan_screens(advice, notes))


def plan_screens(advice: Advice, notes: Sequence[str] = ()) -> Iterator[list[ScreenPart]]:
    """The screens of an advice, for one that is to have few lines: each has one reason less than the one before."""
    above, below = _above_reasons(advice), _below_reasons(advice, notes)
    reasons = _shown_reasons(advice)
    least = 0 if terminal_width() >= _SCREEN_COLUMNS else min(_LEAST_REASONS, len(reasons))
    for num_reasons in range(len(reasons), least - 1, -1):
        yield [*above, *([_reasons_table(reasons[:num_reasons])] if num_reasons else []), *below]


def _above_reasons(advice: Advice) -> list[ScreenPart]:
    software = software_part(advice.job, [plan.time for plan in advice.plans[:1]], _OTHER_SOFTWARE)
    parts: list[ScreenPart] = [Lines([software, _heading(advice)])]
    parts += [paragraph(say("{sentence}.", sentence=sentence)) for sentence in advice.left_out]
    if advice.recommendation is None:
        parts.append(ColouredParts([(paragraph(no_plan_text(advice.job)), "red")]))
    else:
        parts += _recommended(advice, advice.recommendation)
    return parts


def _below_reasons(advice: Advice, notes: Sequence[str]) -> list[ScreenPart]:
    remarks: list[Part] = []
    if advice.own:
        remarks.append(own_paragraph(advice.own, advice.plans))
        if advice.own.misfit and not advice.plans:  # and so there are no details
            remarks.append(misfit_part(advice.own.misfit, advice.own.priced))
    if advice.refused:
        refusal = say(
            "The job's own plan ({plan}) is not legal here: {fault}.",
            plan=job_words(advice.refused.job),
            fault=advice.refused.faults[0],
        )
        remarks.append(paragraph(refusal))
    remarks += [paragraph(note_phrase(note)) for note in (*notes, *job_notes(advice.job))]
    if advice.recommendation:
        more = say("--details has all reasons and the search; --toml FILE writes the job, for `train`.")
        remarks.append(paragraph(more))
    return [Lines(remarks)] if remarks else []


def _heading(advice: Advice) -> Part:
    job, cluster = advice.job, advice.job.cluster
    return paragraph(
        say(
            "{model} on {devices:,} {device}, {sequences} of {tokens:,} tokens a step, computed in "
            "{number}; {plans:,} plans searched in {seconds:.1f} s",
            model=model_name(job),
            devices=cluster.num_devices,
            device=cluster.device,
            sequences=counted_phrase(job.batch.global_batch_size, "sequence"),
            tokens=job.model.sequence,
            number=job.precision.product_number,
            plans=advice.tally.num_plans,
            seconds=advice.tally.seconds,
        )
    )


def _recommended(advice: Advice, recommendation: Recommendation) -> Iterator[ScreenPart]:
    plan = recommendation.plan
    yield _plan_lines(advice, plan)
    if recommendation.simpler:
        yield _simpler_words(advice, plan, recommendation.simpler)
    yield _plans_table(advice)
    if missing := tuple(dict.fromkeys(word for plan in advice.plans for word in lacking(plan))):
        yield paragraph(lacks_note(advice.job, missing))
    if advice.tried:
        yield sizes_part(advice)


def lacks_note(job: JobSpec, missing: tuple[str, ...]) -> str:
    """A sentence on strategies of marked plans that the job's software lacks."""
    return say("* {software} lacks {missing}, which this runtime has.", software=job.cluster.software, missing=missing)


def _plan_lines(advice: Advice, plan: PricedPlan) -> ScreenPart:
    layers = ""
    if plan.job.plan.layout:
        layers = say(", layers: {layers}", layers=layers_words(plan.job.plan.layout))
    recommended = say("Recommended: {plan}{layers}", plan=job_words(plan.job), layers=layers)
    speed = say(
        "{step} a step, {rate:,.0f} tokens/s/device, MFU {mfu:.1%}, {memory}.",
        step=step_text(plan.time.total),
        rate=plan.tokens_per_s_per_device,
        mfu=plan.time.mfu,
        memory=share_text(plan.memory.process, plan.job, plan.fit_chance),
    )
    own_run = _own_run_words(plan, advice.objective)
    return ColouredParts(
        [
            (Paragraph((recommended,), hang="  "), "bold green"),
            *(
                (Paragraph((line,), "  ", "  "), "")
                for line in (speed, _shares_words(plan), _cost_words(advice, plan), *own_run, *_branch_words(plan.job))
            ),
        ]
    )


def _cost_words(advice: Advice, plan: PricedPlan) -> str:
    objective = advice.objective
    tokens = tokens_text(objective.run_tokens)
    days, money = run_days(plan, objective), plan_cost(plan, objective).usd
    time = say("{days} days", days=number_text(days)) if days >= 1 else seconds_text(DAY_S * days)
    goodput = objective.goodput(plan.job)
    failures = say("without time lost to failures") if goodput is None else _failure_words(goodput)
    if money is None:
        return say(
            "{tokens} tokens take {time}, {failures}; no price of {device} is known (--usd-per-hour).",
            tokens=tokens,
            time=time,
            failures=failures,
            device=plan.job.cluster.device,
        )
    return say(
        "{tokens} tokens take {time} and {money}, {price}, {failures}.",
        tokens=tokens,
        time=time,
        money=usd_text(money),
        price=price_words(plan.job.cluster),
        failures=failures,
    )


def _own_run_words(plan: PricedPlan, objective: Objective) -> list[str]:
    """A sentence on the run of the steps that the job states, unless the run shown has as many tokens."""
    job = plan.job
    share = job.tokens_of_run / objective.run_tokens
    if "steps" not in job.optimizer.model_fields_set or abs(share - 1.0) < _SAME_RUN:
        return []
    run = seconds_text(DAY_S * share * run_days(plan, objective))
    usd = plan_cost(plan, objective).usd
    if usd is not None:
        run = say("{time} and {money}", time=run, money=usd_text(share * float(usd)))
    return [
        say(
            "The job's own {steps:,} steps, {tokens} tokens, take {run}.",
            steps=job.optimizer.steps,
            tokens=tokens_text(job.tokens_of_run),
            run=run,
        )
    ]


def _failure_words(goodput: Goodput) -> str:
    """The shares of a run's time that do not train, and the best interval of checkpoints."""
    return say(
        "of which {training:.1%} trains, with a checkpoint every {interval} (checkpoints {checkpoints:.1%}, lost work "
        "{lost:.1%}, restarts {restarts:.1%})",
        training=float(goodput.training),
        interval=seconds_text(float(goodput.interval_s)),
        checkpoints=float(goodput.checkpoints),
        lost=float(goodput.lost_work),
        restarts=float(goodput.restarts),
    )


def _simpler_words(advice: Advice, plan: PricedPlan, simpler: SimplerPlan) -> ScreenPart:
    objective = advice.objective
    costs: str = say("{share:.1%} slower", share=slower_share(simpler.plan, plan))
    own_usd, usd = plan_cost(plan, objective).usd, plan_cost(simpler.plan, objective).usd
    if own_usd is not None and usd is not None:
        dearer = say("{money} more", money=usd_text(float(usd) - float(own_usd)))
        costs = say("{slower} and {dearer}", slower=costs, dearer=dearer)
    differences = list(itertools.islice(difference_words(simpler, plan), _SHOWN_DIFFERENCES))
    words = say(
        "Simpler: {plan}: {costs} (only {sure} sure): {differences}.",
        plan=job_words(simpler.plan.job),
        costs=costs,
        sure=sure_text(simpler.confidence),
        differences=each(differences),
    )
    return ColouredParts([(Paragraph((words,), hang="  "), "cyan")])


def _plans_table(advice: Advice) -> ScreenPart:
    """The best plans, the recommended one first, and their steps with software that many people run."""
    objective = advice.objective
    heading_of_times, times = days_column([run_days(plan, objective) for plan in advice.plans])
    rows = [
        [
            str(number),
            step_text(plan.time.total),
            sure_text(plan.first_is_faster),
            percent_text(plan.time.mfu),
            f"{plan.memory.process / GIB:.1f}",
            run_time,
            usd_text(plan_cost(plan, objective).usd),
            changed_words(plan, advice.plans[0]) if number > 1 else marked_words(plan),
        ]
        for number, (plan, run_time) in enumerate(zip(advice.plans, times, strict=True), 1)
    ]
    heading = ("", say("step"), say("P(1 faster)"), "MFU", "GiB", heading_of_times, say("money"), say("plan"))
    return WideRows(heading, rows, is_first_best=True, below=software_beside(advice.plans))


def _shares_words(plan: PricedPlan) -> str:
    """The shares of the parts of a step, of which those that are small are in the rest."""
    time, total = plan.time, float(plan.time.total)
    named = [(float(getattr(time, part)) / total, name) for part, name in PARTS.items() if part != _REST]
    told = [(share, name) for share, name in named if share >= _LEAST_PART]
    rest = 1.0 - sum(share for share, _ in told)
    told += [(rest, PARTS[_REST])] if rest >= _LEAST_REST else []
    listed = tuple(say("{part} {share:.1%}", part=name, share=share) for share, name in sorted(told, reverse=True))
    return say("Of the step: {shares}.", shares=listed)


def _branch_words(job: JobSpec) -> list[str]:
    """A sentence on what is usual by the tree of `learn choosing` for the job's state, if it is in it."""
    first = place_of_state(job)
    if first is None:
        return []
    verdict = say("this plan agrees") if first.agrees else say("this plan differs")
    return [say("Rule of thumb (`learn choosing`): {place}; {verdict}.", place=first.words, verdict=verdict)]


def nearest_reasons(reasons: list[Reason], step_s: float) -> Iterator[Reason]:
    """For each field the nearest alternative that is slower, or else the first that does not fit."""
    for _, values in itertools.groupby(reasons, key=lambda reason: reason.field):
        worse = [reason for reason in values if reason.excess_bytes > 0 or reason.slower_s > _LEAST_REASON * step_s]
        yield from worse[:1]


def _shown_reasons(advice: Advice) -> list[Reason]:
    """The reasons for what is recommended that matter most, first those of alternatives that are slower by least."""
    if advice.recommendation is None:
        return []
    nearest = nearest_reasons(advice.reasons, float(advice.recommendation.plan.time.total))
    return sorted(nearest, key=lambda reason: (reason.excess_bytes > 0, reason.slower_s))[:_MOST_REASONS]


def _reasons_table(reasons: list[Reason]) -> ScreenPart:
    rows = [
        [
            say("{field} {value}, not {other}", field=reason.field, value=reason.value, other=reason.other),
            misfit_words(reason) if reason.excess_bytes else seconds_text(reason.slower_s),
            reason.decisive,
        ]
        for reason in reasons
    ]
    return WideRows((say("why"), say("slower by"), say("because")), rows, left=(0,))
