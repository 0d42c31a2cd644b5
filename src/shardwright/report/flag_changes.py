"""A job of another system beside better plans for it, in the words of that system: which settings to change."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.exported import exported
from shardwright.config.other_systems.systems import System
from shardwright.config.units import memory_text, seconds_text
from shardwright.planner.advice.advice import Advice, PricedPlan

_SHOWN = 3
_TOLD = 1.005  # times faster, from which a plan is worth a line


@dataclass(frozen=True)
class SettingChange:
    """One setting: its name, the value before and after; None is not there."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Faster:
    """A plan that the system has and that takes less time, with the settings that make it."""

    priced: PricedPlan
    times: float
    changes: tuple[SettingChange, ...]


def changes_of(system: System, before: JobSpec, after: JobSpec) -> tuple[SettingChange, ...]:
    """Settings that make another job of one."""
    old, new = system.settings(before), system.settings(after)
    names = dict.fromkeys([*old, *new])
    return tuple(SettingChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def faster_plans(system: System, own: PricedPlan, advice: Advice) -> list[Faster]:
    """Plans of a search that the system has and that are faster than the job's own, fastest first."""
    found: list[Faster] = []
    for plan in advice.plans:
        times = float(own.time.total / own.job.tokens_per_step * plan.job.tokens_per_step / plan.time.total)
        if (own.fits and times < _TOLD) or len(found) == _SHOWN:
            continue
        try:
            exported(system, plan.job)
        except PlanError:
            continue
        found.append(Faster(plan, times, changes_of(system, own.job, plan.job)))
    return found


def changes_text(system: System, own: PricedPlan, found: list[Faster]) -> str:
    """What the job takes, and what would be faster, for reading."""
    memory = memory_text(int(own.memory.process))
    lines = [
        f"As it stands, {system.title} takes {seconds_text(float(own.time.total))} for a step at {memory} of a "
        f"device's memory{'' if own.fits else ', which does not fit'}."
    ]
    if not found:
        return lines[0] + f" No plan that {system.title} has and that was found is faster."
    for number, one in enumerate(found, 1):
        step, memory = seconds_text(float(one.priced.time.total)), memory_text(int(one.priced.memory.process))
        lines += ["", f"{number}. {_times(one.times)}: {step} for a step at {memory}; change"]
        lines += [f"     {_line(system.prefix, change)}" for change in one.changes]
    return "\n".join(lines)


def changes_dict(own: PricedPlan, found: list[Faster]) -> dict[str, Any]:
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
            }
            for one in found
        ],
    }


def _times(times: float) -> str:
    return f"{times:.2f} times as fast" if times >= 1 else f"{times:.2f} times as fast, and it fits"


def _line(prefix: str, change: SettingChange) -> str:
    name = f"{prefix}{change.name}"
    if change.before is None:
        return f"+ {name}{_after(change.after, prefix)}"
    if change.after is None:
        return f"- {name}{_after(change.before, prefix)}"
    return f"  {name} {_value(change.before)} -> {_value(change.after)}"


def _after(value: Any, prefix: str) -> str:
    return "" if value is True and prefix else f" {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(shlex.quote(str(one)) for one in value)
    return str(value) if isinstance(value, str) else json.dumps(value)
