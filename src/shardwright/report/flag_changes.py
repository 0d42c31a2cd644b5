"""A job of another system and better plans for it, as changes of that system's settings."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, say
from shardwright.config.units import memory_text, seconds_text
from shardwright.interchange.job_files import JobFiles
from shardwright.interchange.system import System
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.report.document import Lines, Paragraph, Part, paragraph
from shardwright.report.step_cost import PARTS, part_words

_SHOWN, _PARTS_SHOWN = 3, 4
_LEAST_SHARE = 0.005  # of a step: a smaller part would be shown as 0 %
_TOKENS = 1e12
_OLDER = ("megatron-2021", "megatron-2022", "megatron-deepspeed")  # generations whose flags had other names
_LEAST_GAIN = 1.005  # a plan that is at least so many times as fast is worth a line


@dataclass(frozen=True)
class SettingChange:
    """A setting that changes: its name, and its values before and after; None if it is absent."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True)
class BetterPlan:
    """A plan that the system supports and that is `times` as fast as the job's own, or fits if that does not.

    `changes` are the settings to change. `superseded` are settings of the files that mean the same under other names,
    and have to go.
    """

    priced: PricedPlan
    times: float
    changes: tuple[SettingChange, ...]
    superseded: tuple[str, ...] = ()


def changes_of(origin: JobFiles, old_job: JobSpec, new_job: JobSpec) -> tuple[SettingChange, ...]:
    """Settings that turn one job into another, without those that its files leave to another file, which has them."""
    old, new = origin.system.settings(old_job), origin.system.settings(new_job)
    names = [name for name in dict.fromkeys([*old, *new]) if name not in origin.automatic]
    return tuple(SettingChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def superseded_settings(
    changes: tuple[SettingChange, ...], own_settings: Mapping[str, Any], sources: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Settings of the files that mean the same as changed settings under other names."""
    changed = {change.name for change in changes}
    aliases = (pair for change in changes for pair in sources.get(change.name, {}).items())
    return tuple(
        dict.fromkeys(spelling for name, spelling in aliases if name not in own_settings and name not in changed)
    )


def faster_plans(
    origin: JobFiles, own_plan: PricedPlan, advice: Advice, sources: Mapping[str, Mapping[str, str]]
) -> list[BetterPlan]:
    """Plans of a search that the system supports: those faster than the job's own, or all if the job does not fit.

    The recommended plan comes first, then the others, fastest first. `sources` are those of `Imported`.
    """
    faster: list[BetterPlan] = []
    recommended = [advice.recommendation.plan] if advice.recommendation else []
    for plan in [*recommended, *(plan for plan in advice.plans if all(plan is not first for first in recommended))]:
        times = float(own_plan.time.total / own_plan.job.tokens_per_step * plan.job.tokens_per_step / plan.time.total)
        if (own_plan.fits and times < _LEAST_GAIN) or len(faster) == _SHOWN:
            continue
        if not origin.has(plan.job):
            continue
        changes = changes_of(origin, own_plan.job, plan.job)
        own_settings = origin.system.settings(own_plan.job)
        faster.append(BetterPlan(plan, times, changes, superseded_settings(changes, own_settings, sources)))
    return faster


def changes_text(
    origin: JobFiles,
    own_plan: PricedPlan,
    better: list[BetterPlan],
    language: str = ENGLISH,
    *,
    is_lacking: bool = False,
) -> str:
    """Text on the job's cost and on better plans, in a language; `is_lacking` says that the system of the job's files
    does not have the plan that is recommended."""
    system, names = origin.system, origin.names
    parts: list[Part] = [_as_it_stands(system, own_plan)]
    if not better:
        return Lines([*parts, _nothing_better(system, own_plan, is_lacking)]).text(language)
    if own_plan.job.cluster.software in _OLDER:
        note = say(
            "Changes are held to what {software} has (--as megatron-core for what today's code has); flags have the "
            "names of today's Megatron-LM, which code of that age has others for.",
            software=own_plan.job.cluster.software,
        )
        parts.append(paragraph(note))
    for number, plan in enumerate(better, 1):
        parts += ["", _heading(number, plan, own_plan.fits)]
        written = [change for change in plan.changes if not (plan.superseded and _is_removed_unwritten(change, names))]
        parts += [_changed_line(system.prefix, change, names) for change in written]
        parts += [f"     - {spelling}" for spelling in plan.superseded]
    return Lines(parts).text(language)


def _nothing_better(system: System, own_plan: PricedPlan, is_lacking: bool) -> Paragraph:
    """The verdict where no better plan was found."""
    if not own_plan.fits:
        return paragraph(
            say("The job does not fit, and no plan that {system} has and that fits was found.", system=system.title)
        )
    return paragraph(
        say("No plan that {system} has and that was found is faster: nothing has to be changed.", system=system.title),
        say("What is recommended below needs another system.") if is_lacking else "",
    )


def _step_text(step_s: float) -> str:
    """A step in seconds, or less, as in the plans that are told below, however long it is."""
    return seconds_text(step_s, beside_s=min(step_s, 1.0))


def _heading(number: int, plan: BetterPlan, own_fits: bool) -> str:
    """The line above the changes of a plan."""
    return say(
        "{number}. {times}: {step} for a step at {memory}; change",
        number=number,
        times=_times(plan.times, own_fits),
        step=_step_text(float(plan.priced.time.total)),
        memory=memory_text(int(plan.priced.memory.process)),
    )


def _as_it_stands(system: System, own_plan: PricedPlan) -> Paragraph:
    """Text on the job's cost and where its time goes."""
    money = ""
    if own_plan.money.usd:
        usd = own_plan.money.usd * _TOKENS / own_plan.job.tokens_per_step
        money = say(", and ${usd:,.0f} for 1e12 tokens", usd=usd)
    total, words = float(own_plan.time.total), part_words()
    parts = sorted(((float(getattr(own_plan.time, part)), words[part]) for part in PARTS), reverse=True)
    cost = say(
        "As it stands, {system} takes {step} for a step (as {software}), MFU {mfu:.1%}, at {memory} of a device's "
        "memory{misfit}{money}.",
        system=system.title,
        step=_step_text(total),
        software=own_plan.job.cluster.software,
        mfu=float(own_plan.time.mfu),
        memory=memory_text(int(own_plan.memory.process)),
        misfit="" if own_plan.fits else say(", which does not fit"),
        money=money,
    )
    largest = [
        say("{part} {share:.0%}", part=part, share=seconds / total)
        for seconds, part in parts[:_PARTS_SHOWN]
        if seconds > _LEAST_SHARE * total
    ]
    return paragraph(cost, say("Most of that: {parts}.", parts=tuple(largest)))


def changes_dict(own_plan: PricedPlan, better: list[BetterPlan]) -> dict[str, Any]:
    """The changes for `--json`. Bytes and seconds; null for a setting that is absent."""
    return {
        "step_s": float(own_plan.time.total),
        "process_bytes": float(own_plan.memory.process),
        "fits": own_plan.fits,
        "faster": [
            {
                "step_s": float(plan.priced.time.total),
                "process_bytes": float(plan.priced.memory.process),
                "times_faster": plan.times,
                "changes": {change.name: [change.old, change.new] for change in plan.changes},
                "instead_of": list(plan.superseded),
            }
            for plan in better
        ],
    }


def _times(times: float, own_fits: bool) -> str:
    if own_fits:
        return say("{times:.2f} times as fast", times=times)
    return say("{times:.2f} times as fast, and it fits", times=times)


def change_words(origin: JobFiles, old_job: JobSpec, new_job: JobSpec) -> str:
    """The settings that turn one job into another, in a line: "zero_optimization.stage 2 -> 3, - --zero_stage"."""
    changes = changes_of(origin, old_job, new_job)
    return ", ".join(_line(origin.system.prefix, change).strip() for change in changes)


def _line(prefix: str, change: SettingChange) -> str:
    name = f"{prefix}{change.name}"
    if change.old is None:
        return f"+ {name}{_value_after(name, change.new)}"
    if change.new is None:
        return f"- {name}{_value_after(name, change.old)}"
    return f"  {name} {_value(name, change.old)} -> {_value(name, change.new)}"


def _is_removed_unwritten(change: SettingChange, names: frozenset[str]) -> bool:
    """True for a setting that goes and that the files do not have under its name, but under another or as a default."""
    return change.new is None and change.name not in names


def _changed_line(prefix: str, change: SettingChange, names: frozenset[str]) -> str:
    """The line of a change, with a remark on a setting that the files have under an older name, or as a default."""
    line = f"     {_line(prefix, change)}"
    if change.old is None or change.name in names:
        return line
    return say("{line}  (by another name there, or a default)", line=line)


def _value_after(name: str, value: Any) -> str:
    return "" if value is True and name.startswith("--") else f" {_value(name, value)}"


def _value(name: str, value: Any) -> str:
    """A value as a system's file writes it. Values of flags are quoted, since a shell gives "|" and "*" a meaning."""
    if isinstance(value, list):
        return " ".join(shlex.quote(str(item)) for item in value)
    if isinstance(value, str):
        return shlex.quote(value) if name.startswith("--") else value
    return json.dumps(value)
