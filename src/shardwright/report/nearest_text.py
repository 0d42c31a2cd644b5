"""Plans that fit and differ in few fields from one that does not: options to paste, each with memory and time; and the
options that turn a job into another one."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import memory_text, seconds_text
from shardwright.report.document import AlignedRows, Lines, Part, paragraph

if TYPE_CHECKING:
    from shardwright.interchange.job_files import JobFiles
    from shardwright.planner.advice.repair import Near
    from shardwright.planner.own_plan import Estimate

_SHOWN = 3


@dataclass(frozen=True)
class NearestPlans:
    """The nearest plans to one that does not fit, for a job, and for the files of another system that it was read from,
    if it was. They are searched once, when somebody asks for them first."""

    job: JobSpec
    origin: "JobFiles | None" = None

    @cached_property
    def plans(self) -> "list[Near]":
        """At most three plans, fastest first. For a job of another system's files they are plans that this system
        has."""
        from shardwright.config.schedule_facts import searched
        from shardwright.cost.calibration import shipped
        from shardwright.planner.advice.repair import NO_LIMITS, Limits, nearest_that_fit

        limits = NO_LIMITS
        if self.origin is not None and self.origin.has(self.job):
            limits = Limits(self.origin.system.has(self.job.cluster.software), self.origin.has)
        return nearest_that_fit(self.job, searched(), shipped(), _SHOWN, with_fastest=True, limits=limits)


def near_plans(nearest: NearestPlans, fits: bool, priced: "Estimate") -> "list[Near]":
    """The nearest plans; none for a plan that fits."""
    from shardwright.planner.search.plan_price import room_bytes

    return [] if fits and priced.memory.process <= room_bytes(nearest.job) else nearest.plans


def nearest_dicts(job: JobSpec, plans: "list[Near]") -> list[dict[str, Any]]:
    """The nearest plans for `--json`. Bytes are those of the fullest process, seconds those of a step that is simulated
    in full."""
    return [
        {
            "set": set_line(job, near.job),
            "process_bytes": float(near.price.memory.process),
            "step_s": float(near.price.time.total),
        }
        for near in plans
    ]


def nearest_part(job: JobSpec, plans: "list[Near]", origin: "JobFiles | None" = None) -> Part:
    """The nearest plans for reading, for a plan that does not fit; with the settings of the files that change."""
    nearest = nearest_dicts(job, plans)
    if not nearest:
        return paragraph(
            say(
                "No plan fits that takes at most four times as long. `shardwright plan` looks at all plans; or use "
                "more devices, or some with more memory."
            )
        )
    rows: list[list[str]] = [[say("process"), say("step"), say("add to this command")]]
    for plan, near in zip(plans, nearest, strict=True):
        rows.append([memory_text(int(near["process_bytes"])), seconds_text(near["step_s"]), near["set"]])
        if origin is not None:
            rows.append(["", "", _in_the_files(origin, job, plan.job)])
    return Lines((say("The nearest plans that fit:"), AlignedRows(rows, left=(2,))))


def _in_the_files(origin: "JobFiles", job: JobSpec, new_job: JobSpec) -> str:
    """The settings of a job's files that make another plan of it."""
    from shardwright.report.flag_changes import change_words

    return say("in its files: {changes}", changes=change_words(origin, job, new_job))


def set_line(old_job: JobSpec, new_job: JobSpec) -> str:
    """The fields of plan and precision that differ, as options: "--set plan.tp=4 --set plan.dp=2"."""
    fields = {}
    for section in ("plan", "precision"):
        old, new = getattr(old_job, section), getattr(new_job, section)
        for name in type(old).model_fields:
            value = getattr(new, name)
            if value != getattr(old, name) and name != "fallback":  # fallbacks are no part of the plan that runs
                fields[f"{section}.{name}"] = value
    return set_words(fields)


def set_words(fields: Mapping[str, Any]) -> str:
    """Fields, by their full names, as options."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return " ".join(f"--set {shlex.quote(f'{name}={text}')}" for name, text in texts.items())
