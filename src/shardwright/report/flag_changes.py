"""A job of another system beside better plans for it, in the words of that system: which settings to change."""

import json
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.exported import exported
from shardwright.config.other_systems.systems import System
from shardwright.config.units import memory_text, seconds_text
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.report.step_cost import PARTS

_SHOWN, _PARTS_SHOWN = 3, 4
_TOKENS = 1e12
_OLDER = ("megatron-2021", "megatron-2022", "megatron-deepspeed")  # generations whose flags had other names
_TOLD = 1.005  # times faster, from which a plan is worth a line


@dataclass(frozen=True)
class SettingChange:
    """One setting: its name, the value before and after; None is not there."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class BetterPlan:
    """A plan that the system has and that is faster than the job's own, or fits where that does not, with the settings
    that make it. `instead` are settings of the files that say the same by other names, and have to go."""

    priced: PricedPlan
    times: float
    changes: tuple[SettingChange, ...]
    instead: tuple[str, ...] = ()


def changes_of(system: System, before: JobSpec, after: JobSpec) -> tuple[SettingChange, ...]:
    """Settings that make another job of one."""
    old, new = system.settings(before), system.settings(after)
    names = dict.fromkeys([*old, *new])
    return tuple(SettingChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def instead_of(
    changes: tuple[SettingChange, ...], before: Mapping[str, Any], sources: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Settings of the files, as they say them, that mean what is changed and have other names than it is told by."""
    told = {change.name for change in changes}
    instead = (one for change in changes for one in sources.get(change.name, {}).items())
    return tuple(dict.fromkeys(other_name for name, other_name in instead if name not in before and name not in told))


def faster_plans(
    system: System, own: PricedPlan, advice: Advice, sources: Mapping[str, Mapping[str, str]]
) -> list[BetterPlan]:
    """Plans of a search that the system has: those faster than the job's own, or all where the job does not fit. The
    recommended one comes first, then the others, fastest first. `sources` are those of `Imported`."""
    better: list[BetterPlan] = []
    first = [advice.recommendation.plan] if advice.recommendation else []
    for plan in [*first, *(plan for plan in advice.plans if all(plan is not one for one in first))]:
        times = float(own.time.total / own.job.tokens_per_step * plan.job.tokens_per_step / plan.time.total)
        if (own.fits and times < _TOLD) or len(better) == _SHOWN:
            continue
        try:
            exported(system, plan.job)
        except PlanError:
            continue
        changes = changes_of(system, own.job, plan.job)
        better.append(BetterPlan(plan, times, changes, instead_of(changes, system.settings(own.job), sources)))
    return better


def changes_text(system: System, own: PricedPlan, names: frozenset[str], better: list[BetterPlan]) -> str:
    """Text on the job's cost and on better plans. `names` are the settings that the files have."""
    lines = [textwrap.fill(_as_it_stands(system, own), 110)]
    if not better:
        stays = f"No plan that {system.title} has and that was found is faster: nothing has to be changed."
        if not own.fits:
            stays = f"The job does not fit, and no plan that {system.title} has and that fits was found."
        else:
            stays += " What is recommended below is the simplest of those as good, for a job that begins."
        return "\n".join([lines[0], textwrap.fill(stays, 110)])
    if own.job.cluster.software in _OLDER:
        lines.append(
            textwrap.fill(
                f"Changes are held to what {own.job.cluster.software} has (--as megatron-core for what today's code "
                "has); flags have the names of today's Megatron-LM, which code of that age has others for.", 110,
            )
        )  # fmt: skip
    for number, one in enumerate(better, 1):
        step, memory = seconds_text(float(one.priced.time.total)), memory_text(int(one.priced.memory.process))
        lines += ["", f"{number}. {_times(one.times, own.fits)}: {step} for a step at {memory}; change"]
        lines += [f"     {_line(system.prefix, change)}{_said(change, names)}" for change in one.changes]
        if one.instead:
            note = f"Some of it is said there in other words, which have to go: {', '.join(one.instead)}."
            lines += textwrap.wrap(
                note, 110, initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False, break_long_words=False
            )
    return "\n".join(lines)


def _as_it_stands(system: System, own: PricedPlan) -> str:
    """Text on the job's cost and where its time goes."""
    step, memory = seconds_text(float(own.time.total)), memory_text(int(own.memory.process))
    software, mfu = own.job.cluster.software, float(own.time.mfu)
    text = f"As it stands, {system.title} takes {step} for a step (as {software}), MFU {mfu:.1%}, at {memory} of a "
    text += f"device's memory{'' if own.fits else ', which does not fit'}"
    if own.money.usd:
        text += f", and ${own.money.usd * _TOKENS / own.job.tokens_per_step:,.0f} for 1e12 tokens"
    parts = sorted(((float(getattr(own.time, part)), words) for part, words in PARTS.items()), reverse=True)
    told = [f"{words} {seconds / float(own.time.total):.0%}" for seconds, words in parts[:_PARTS_SHOWN] if seconds]
    return f"{text}. Most of that: {', '.join(told)}."


def changes_dict(own: PricedPlan, better: list[BetterPlan]) -> dict[str, Any]:
    """For `--json`. Bytes and seconds; null is not there."""
    return {
        "step_s": float(own.time.total),
        "process_bytes": float(own.memory.process),
        "fits": own.fits,
        "faster": [
            {
                "step_s": float(one.priced.time.total),
                "process_bytes": float(one.priced.memory.process),
                "times_faster": one.times,
                "changes": {change.name: [change.before, change.after] for change in one.changes},
                "instead_of": list(one.instead),
            }
            for one in better
        ],
    }


def _times(times: float, own_fits: bool) -> str:
    return f"{times:.2f} times as fast" + ("" if own_fits else ", and it fits")


def _line(prefix: str, change: SettingChange) -> str:
    name = f"{prefix}{change.name}"
    if change.before is None:
        return f"+ {name}{_after(name, change.after)}"
    if change.after is None:
        return f"- {name}{_after(name, change.before)}"
    return f"  {name} {_value(name, change.before)} -> {_value(name, change.after)}"


def _said(change: SettingChange, names: frozenset[str]) -> str:
    """A remark on a setting that is there by an older name, or as a default."""
    return "" if change.before is None or change.name in names else "  (by another name there, or a default)"


def _after(name: str, value: Any) -> str:
    return "" if value is True and name.startswith("--") else f" {_value(name, value)}"


def _value(name: str, value: Any) -> str:
    """A value as the file of a system has it: a shell reads those of flags, to which "|" and "*" say something."""
    if isinstance(value, list):
        return " ".join(shlex.quote(str(one)) for one in value)
    if isinstance(value, str):
        return shlex.quote(value) if name.startswith("--") else value
    return json.dumps(value)
