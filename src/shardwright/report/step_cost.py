"""The cost of a plan, in words and as JSON: the parts of a step's time, money, energy, and time lost to failures."""

from dataclasses import asdict
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.units import counted, seconds_text
from shardwright.cost.money import price_words
from shardwright.planner.own_plan import Estimate
from shardwright.report.text_columns import aligned, filled

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


def price_dict(job: JobSpec, estimate: Estimate) -> dict[str, Any]:
    """Fields of `estimate --json` and of a plan: seconds, shares, US dollars; null is unknown."""
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
            "1e12_tokens": asdict(estimate.cost_of_steps(steps_1e12_tokens))
            | {"seconds": steps_1e12_tokens * estimate.effective_step_s},
            "run": asdict(estimate.cost_of_steps(steps_of_run))
            | {"seconds": steps_of_run * estimate.effective_step_s, "steps": job.optimizer.steps},
        },
        "process_bytes": estimate.memory.process,  # all that the device must have
        "goodput": asdict(estimate.goodput) if estimate.goodput else None,
        "gaps": list(estimate.gaps),
    }


def price_text(job: JobSpec, estimate: Estimate) -> str:
    """The price of a step and of a run as text."""
    blocks = [_speed(job, estimate), _parts(estimate), _money(job, estimate), _failures(estimate)]
    gaps = [filled(f"{gap[0].upper()}{gap[1:]}.") for gap in estimate.gaps]
    return "\n\n".join(block for block in [*blocks, *gaps] if block)


def _speed(job: JobSpec, estimate: Estimate) -> str:
    step = estimate.step
    return filled(
        f"A step of {job.tokens_per_step:,} tokens takes {seconds_text(step.total)}; four of five lie between "
        f"{seconds_text(step.low)} and {seconds_text(step.high)}. That is {estimate.tokens_per_s_per_device:,.0f} "
        f"tokens a second and device, MFU {100 * step.mfu:.1f} % and HFU {100 * step.hfu:.1f} % of "
        f"{_rounded(estimate.peak_flops / 1e12)} TFLOP/s, the peak in {job.precision.product_number}."
    )


def _parts(estimate: Estimate) -> str:
    unit, name = (1.0, "seconds") if estimate.step.total >= 1.0 else (1e-3, "milliseconds")
    rows = [["of a step", name, ""]]
    for part, words in PARTS.items():
        seconds = getattr(estimate.step, part)
        if seconds > 0.0005 * estimate.step.total:
            rows.append([words, f"{seconds / unit:.3f}", f"{100 * seconds / estimate.step.total:.1f} %"])
    return aligned(rows)


def _money(job: JobSpec, estimate: Estimate) -> str:
    tokens = f"{job.tokens_of_run:.3g}".replace("e+0", "e").replace("e+", "e")
    columns = {
        "a step": (estimate.step_money, estimate.step.total),
        "1e12 tokens": (
            estimate.cost_of_steps(estimate.num_steps_1e12_tokens),
            estimate.num_steps_1e12_tokens * estimate.effective_step_s,
        ),
        f"the run, {tokens} tokens": (
            estimate.cost_of_steps(estimate.num_steps_of_run),
            estimate.num_steps_of_run * estimate.effective_step_s,
        ),
    }
    rows = [["", *columns], ["time", *(seconds_text(seconds) for _, seconds in columns.values())]]
    rows.append(["device-hours", *(_rounded(float(money.device_hours)) for money, _ in columns.values())])
    if estimate.step_money.usd is not None:
        rows.append(["money", *(_dollars(float(money.usd or 0)) for money, _ in columns.values())])
    if estimate.step_money.kwh is not None:
        rows.append(["energy", *(f"{_rounded(float(money.kwh or 0))} kWh" for money, _ in columns.values())])
    price = price_words(job.cluster)
    return aligned(rows) + (f"\n\n{filled(f'Money is counted {price}.')}" if price else "")


def _failures(estimate: Estimate) -> str:
    reliability, goodput = estimate.reliability, estimate.goodput
    if reliability is None or goodput is None:
        return ""
    steps = max(1, round(float(goodput.interval_s) / estimate.step.total))
    return filled(
        f"A failure is expected every {seconds_text(float(reliability.between_failures_s))}. With a checkpoint of "
        f"{estimate.checkpoint_bytes / 1e12:.3g} TB, which takes "
        f"{seconds_text(float(reliability.checkpoint_s))}, after "
        f"every {seconds_text(float(goodput.interval_s))} ({counted(steps, 'step')}), which is best, "
        f"{100 * goodput.training:.1f} % of the time trains; checkpoints take {100 * goodput.checkpoints:.1f} %, lost "
        f"work {100 * goodput.lost_work:.1f} % and restarts {100 * goodput.restarts:.1f} %. 1e12 tokens and the run "
        "have that in them."
    )


def _dollars(value: float) -> str:
    """US dollars, with cents below 100 dollars."""
    return f"${value:,.2f}" if 0.01 <= value < 100 else f"${_rounded(value)}"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
