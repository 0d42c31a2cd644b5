"""The cost of a plan, in words and as JSON: the parts of a step's time, money, energy, and time lost to failures."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, capitalized, fixed, say
from shardwright.config.software import software_of
from shardwright.config.units import counted_phrase, number_text, seconds_text, tokens_text
from shardwright.cost.money import price_words
from shardwright.planner.own_plan import Estimate, PricedStep
from shardwright.report.document import AlignedRows, Part, paragraph
from shardwright.simulate.closed_form import StepTime

_OTHER_SOFTWARE = say("With software that you run: --as megatron-core, and others of `shardwright software`.")
_SAME_RUN = 0.01  # runs whose lengths differ by less are shown as one

# Parts of StepTime (simulate/closed_form.py) in words. They add up to the step.
PARTS = {
    "compute": "computing",
    "again": "computing again",
    "tensor": "tensor-parallel communication that nothing hides",
    "context": "context-parallel communication that nothing hides",
    "expert": "tokens' way to experts and back that nothing hides",
    "data": "gradients and parameters of replicas that nothing hides",
    "messages": "messages of the pipeline",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "host": "on the way to host memory and there",
    "other": "host, jitter, norm of gradients",
}


def part_words() -> dict[str, Phrase]:
    """The parts of a step in words."""
    return {part: fixed(words) for part, words in PARTS.items()}


def price_dict(job: JobSpec, estimate: Estimate) -> dict[str, Any]:
    """Fields of `estimate --json` and of a plan: seconds, shares, US dollars; null is unknown."""
    return step_dict(job, estimate) | {"process_bytes": estimate.memory.process}  # all that the device must have


def step_dict(job: JobSpec, estimate: PricedStep) -> dict[str, Any]:
    """The fields of `price_dict` on time and money."""
    step = estimate.step
    # In units of a full-batch step: those of a batch-size ramp-up are shorter.
    steps_1e12_tokens, steps_of_run = estimate.num_steps_1e12_tokens, estimate.num_steps_of_run
    return {
        "step_s": step.total,
        "step_range_s": [step.low, step.high],
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "time": {part: getattr(step, part) for part in PARTS},
        "cost_per_step": estimate.step_money.usd,
        "money": {
            "step": asdict(estimate.step_money),
            "1e12_tokens": None  # nobody trains adapters on so many
            if job.model.is_adapted
            else asdict(estimate.cost_of_steps(steps_1e12_tokens))
            | {"seconds": steps_1e12_tokens * estimate.effective_step_s},
            "run": asdict(estimate.cost_of_steps(steps_of_run))
            | {"seconds": steps_of_run * estimate.effective_step_s, "steps": job.optimizer.steps},
        },
        "goodput": asdict(estimate.goodput) if estimate.goodput else None,
        "gaps": list(estimate.gaps),
    }


def software_part(job: JobSpec, times: Sequence[StepTime], other_software: str) -> Part:
    """The software that predictions of steps are about, and how far they may be off, the least sure of them; of this
    runtime also how to ask for `other_software`."""
    software = software_of(job.cluster.software)
    error = ""
    if times:
        error = say(
            "Four of five runs like it, to which nothing was fitted, took {low:.2f} to {high:.2f} times as long.",
            low=min(float(time.low) / float(time.total) for time in times),
            high=max(float(time.high) / float(time.total) for time in times),
        )
    if not software.is_own:
        return paragraph(say("Predicted, not measured: steps of {software}.", software=software.name), error)
    own = say(
        "Predicted, not measured: steps of this runtime, Shardwright's own, which has not run on several devices yet."
    )
    return paragraph(own, error, other_software)


def price_parts(job: JobSpec, estimate: Estimate) -> list[Part]:
    """The price of a step and of a run, for reading."""
    gaps = [paragraph(say("{gap}.", gap=capitalized(gap))) for gap in estimate.gaps]
    software = software_part(job, [], _OTHER_SOFTWARE)
    return [_speed(job, estimate), _parts(estimate), *_money(job, estimate), software, *_failures(job, estimate), *gaps]


def _speed(job: JobSpec, estimate: Estimate) -> Part:
    step = estimate.step
    return paragraph(
        say(
            "A step of {tokens:,} tokens takes {seconds}; four of five lie between {low} and {high}.",
            tokens=job.tokens_per_step,
            seconds=seconds_text(step.total),
            low=seconds_text(step.low, step.total),
            high=seconds_text(step.high, step.total),
        ),
        say(
            "That is {throughput:,.0f} tokens a second and device, MFU {mfu:.1f} % and HFU {hfu:.1f} % of {peak} "
            "TFLOP/s, the peak in {number}.",
            throughput=estimate.tokens_per_s_per_device,
            mfu=100 * step.mfu,
            hfu=100 * step.hfu,
            peak=number_text(estimate.peak_flops / 1e12),
            number=job.precision.product_number,
        ),
    )


def _parts(estimate: Estimate) -> Part:
    unit, name = (1.0, say("seconds")) if estimate.step.total >= 1.0 else (1e-3, say("milliseconds"))
    rows: list[list[str]] = [[say("of a step"), name, ""]]
    for part, words in PARTS.items():
        seconds = getattr(estimate.step, part)
        if seconds > 0.0005 * estimate.step.total:
            rows.append([say(words), f"{seconds / unit:.3f}", f"{100 * seconds / estimate.step.total:.1f} %"])
    return AlignedRows(rows)


def _has_two_runs(job: JobSpec, estimate: Estimate) -> bool:
    """True if 1e12 tokens are priced beside the run: not of adapters, nor where the run is as long."""
    ratio = estimate.num_steps_of_run / estimate.num_steps_1e12_tokens
    return not job.model.is_adapted and abs(ratio - 1.0) > _SAME_RUN


def _money(job: JobSpec, estimate: Estimate) -> list[Part]:
    tokens = tokens_text(job.tokens_of_run)
    run = say("the run, {tokens} tokens", tokens=tokens)
    counts = {say("1e12 tokens"): estimate.num_steps_1e12_tokens} if _has_two_runs(job, estimate) else {}
    counts[run] = estimate.num_steps_of_run
    columns = {say("a step"): (estimate.step_money, estimate.step.total)} | {
        name: (estimate.cost_of_steps(count), count * estimate.effective_step_s) for name, count in counts.items()
    }
    rows: list[list[str]] = [["", *columns], [say("time"), *(seconds_text(seconds) for _, seconds in columns.values())]]
    rows.append([say("device-hours"), *(number_text(float(money.device_hours)) for money, _ in columns.values())])
    if estimate.step_money.usd is not None:
        rows.append([say("money"), *(_dollars(float(money.usd or 0)) for money, _ in columns.values())])
    if estimate.step_money.kwh is not None:
        rows.append([say("energy"), *(f"{number_text(float(money.kwh or 0))} kWh" for money, _ in columns.values())])
    price = price_words(job.cluster)
    return [AlignedRows(rows), *([paragraph(say("Money is counted {price}.", price=price))] if price else [])]


def _failures(job: JobSpec, estimate: Estimate) -> list[Part]:
    reliability, goodput = estimate.reliability, estimate.goodput
    if reliability is None or goodput is None:
        return []
    steps = max(1, round(float(goodput.interval_s) / estimate.step.total))
    return [
        paragraph(
            say("A failure is expected every {between}.", between=seconds_text(float(reliability.between_failures_s))),
            say(
                "With a checkpoint of {terabytes:.3g} TB, which takes {takes}, after every {interval} ({steps}), which "
                "is best, {training:.1f} % of the time trains; checkpoints take {checkpoints:.1f} %, lost work "
                "{lost:.1f} % and restarts {restarts:.1f} %.",
                terabytes=estimate.checkpoint_bytes / 1e12,
                takes=seconds_text(float(reliability.checkpoint_s)),
                interval=seconds_text(float(goodput.interval_s)),
                steps=counted_phrase(steps, "step"),
                training=100 * goodput.training,
                checkpoints=100 * goodput.checkpoints,
                lost=100 * goodput.lost_work,
                restarts=100 * goodput.restarts,
            ),
            say("1e12 tokens and the run have that in them.")
            if _has_two_runs(job, estimate)
            else say("The run has that in it."),
        )
    ]


def _dollars(value: float) -> str:
    """US dollars, with cents below 100 dollars."""
    return f"${value:,.2f}" if 0.01 <= value < 100 else f"${number_text(value)}"
