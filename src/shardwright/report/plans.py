"""The best plans as text that says why, and as JSON."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from shardwright.cost.calibration import device_of
from shardwright.planner.advice import Advice, Priced
from shardwright.planner.reasons import PARTS, Reason
from shardwright.report.table import aligned
from shardwright.spec.job import JobSpec
from shardwright.spec.plan import PlanSpec

_WIDTH = 118
_GIB = 2**30
# Fields of a plan that are told only where they are not the default.
_SHORT = {
    "virtual_stages": "v", "microbatch_size": "mb", "sequence_parallel": "sp", "recompute_every": "every",
    "zero_ranks": "over",
}  # fmt: skip


def show_plans(advice: Advice, job: JobSpec, as_json: bool) -> None:
    """Print what was found."""
    click.echo(json.dumps([as_dict(plan) for plan in advice.plans]) if as_json else plans_text(advice, job))


def as_dict(plan: Priced) -> dict[str, Any]:
    """One plan of `--json`: all fields of the plan, seconds, bytes, US dollars (null where the price is unknown)."""
    time, memory = plan.time.as_dict(), plan.memory.as_dict()
    return {
        "plan": plan.job.plan.model_dump(),
        "global_batch_size": plan.job.batch.global_batch_size,
        "step_s": float(plan.time.total),
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "mfu": float(plan.time.mfu),
        "hfu": float(plan.time.hfu),
        "cost_per_step": plan.money.usd,
        "memory": {name: float(value) for name, value in memory.items()} | {"process": float(plan.memory.process)},
        "time": {name: float(value) for name, value in time.items() if name not in ("mfu", "hfu")},
        "fits": plan.fits,
    }


def plan_words(plan: PlanSpec) -> str:
    """A plan in one line: its degrees, and what of the rest is not the default."""
    axes = ["tp", "pp", "dp", *(axis for axis in ("cp", "ep") if getattr(plan, axis) > 1)]
    words = [f"{axis} {getattr(plan, axis)}" for axis in axes]
    if plan.pp > 1:
        words.append(plan.schedule + (f" v {plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    words.append(f"mb {plan.microbatch_size}")
    words.append(f"zero {plan.zero}" + (f" over {plan.zero_ranks}" if plan.zero_ranks else ""))
    if plan.recompute != "none":
        operators = f" {'+'.join(plan.recompute_operators)}" if plan.recompute == "selective" else ""
        every = f" every {plan.recompute_every}" if plan.recompute_every > 1 else ""
        words.append(f"recompute {plan.recompute}{operators}{every}")
    words += [
        name for name in ("sequence_parallel", "offload_parameters", "offload_activations") if getattr(plan, name)
    ]
    if plan.offload_optimizer:
        words.append("offload_optimizer")
    if plan.cp > 1:
        words.append(plan.cp_method)
    if plan.dispatch != "direct":
        words.append(plan.dispatch)
    return ", ".join(words)


def plans_text(advice: Advice, job: JobSpec) -> str:
    """All of it, a paragraph a matter."""
    return "\n\n".join(_paragraphs(advice, job))


def _paragraphs(advice: Advice, job: JobSpec) -> Iterator[str]:
    cluster, tally = job.cluster, advice.tally
    room = device_of(cluster.device).memory_gib
    yield (
        f"{job.model.name} on {cluster.num_devices:,} {cluster.device} ({cluster.name}), "
        f"{job.batch.global_batch_size:,} sequences of {job.model.sequence:,} tokens a step"
    )
    yield _filled(
        f"The space has {tally.num_plans:,} plans. Bounds excluded all but {tally.num_priced:,}, which were priced; "
        f"{tally.num_fit:,} of those fit in {room:g} GiB. That took {tally.seconds:.2f} s."
    )
    if not advice.plans:
        yield "No plan fits. " + _nothing(advice)
        return
    yield aligned(list(_rows(advice.plans)))
    best = advice.plans[0]
    yield "The best plan\n" + aligned(list(_breakdown(best)))
    if advice.binding:
        yield _filled(f"What binds: {advice.binding.text}.")
    yield "Why not another\n" + "\n".join(_reason_lines(advice.reasons))
    yield "Rules of thumb\n" + "\n".join(
        _filled(f"{'agrees  ' if rule.agrees else 'DIFFERS '}  {rule.name}: {rule.says} ({rule.source})", hang=12)
        for rule in advice.rules
    )
    if advice.own:
        yield _own(advice.own, best)


def _filled(text: str, hang: int = 0) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  " if hang else "", subsequent_indent=" " * hang)


def _rows(plans: list[Priced]) -> Iterator[list[str]]:
    yield ["", "step", "tokens/s/device", "MFU", "HFU", "memory", "cost", "plan"]
    for number, plan in enumerate(plans, 1):
        usd = "unknown" if plan.money.usd is None else f"{float(plan.money.usd):,.0f} USD"
        yield [
            str(number), f"{plan.time.total:.3f} s", f"{plan.tokens_per_s_per_device:,.0f}", f"{plan.time.mfu:.1%}",
            f"{plan.time.hfu:.1%}", f"{plan.memory.process / _GIB:.1f} GiB", usd, plan_words(plan.job.plan),
        ]  # fmt: skip


def _breakdown(plan: Priced) -> Iterator[list[str]]:
    """Time and memory side by side: a part a line."""
    total = float(plan.time.total)
    times = [
        (name, float(getattr(plan.time, part))) for part, name in PARTS.items() if float(getattr(plan.time, part)) > 0
    ]
    kinds = [(name, float(value)) for name, value in plan.memory.as_dict().items() if name != "total"]
    times.append(("step", total))
    kinds.append(("process", float(plan.memory.process)))
    for row in range(max(len(times), len(kinds))):
        left = (
            [times[row][0], f"{times[row][1]:.3f} s", f"{times[row][1] / total:.1%}"] if row < len(times) else [""] * 3
        )
        right = [kinds[row][0], f"{kinds[row][1] / _GIB:.2f} GiB"] if row < len(kinds) else [""] * 2
        yield ["  " + left[0], *left[1:], "  " + right[0], right[1]]


def _reason_lines(reasons: list[Reason]) -> Iterator[str]:
    for reason in reasons:
        if reason.excess_bytes:
            cost = "does not fit"
        else:
            cost = f"{abs(reason.slower_s):.3g} s {'slower' if reason.slower_s >= 0 else 'FASTER'}"
        yield _filled(f"{reason.field} {reason.value}, not {reason.other}: {cost}: {reason.text}", hang=6)


def _own(own: Priced, best: Priced) -> str:
    off = float(own.time.total / best.time.total) - 1
    fits = "" if own.fits else f"; it does not fit ({own.memory.process / _GIB:.1f} GiB)"
    return _filled(
        f"The job's own plan ({plan_words(own.job.plan)}) takes {own.time.total:.3f} s, {off:.1%} more than the best"
        f"{fits}."
    )


def _nothing(advice: Advice) -> str:
    return _filled(
        "Use more devices (cluster.nodes), a device with more memory, a shorter model.sequence, or fewer --keep."
    )


def write_toml(path: Path, job: JobSpec) -> None:
    """The job as a TOML file, which every command on a job reads: fields that are not the default."""
    fields = job.model_dump(exclude_defaults=True)
    lines: list[str] = [f"name = {_toml(fields.pop('name', job.name))}"]
    for section, values in fields.items():
        lines += ["", *_section(section, values)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _section(name: str, values: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    yield f"[{name}]"
    yield from (f"{key} = {_toml(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            yield ""
            yield from _section(f"{name}.{key}", value)


def _toml(value: object) -> str:
    """JSON's numbers, strings, booleans and lists of them are TOML's."""
    return json.dumps(value)
