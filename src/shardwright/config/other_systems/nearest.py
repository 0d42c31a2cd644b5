"""The nearest job to one that a system lacks, and the fields that make it of that one."""

from collections.abc import Callable, Iterator
from typing import Any

from shardwright.config.checks.check import job_faults
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.meaning import differences
from shardwright.config.other_systems.settings import Flat
from shardwright.config.plan import UNSEARCHED

_SECTIONS = ("model", "plan", "batch", "precision", "optimizer")


def variants(job: JobSpec) -> Iterator[JobSpec]:
    """The job, and what it is without a field that decides what a system has of the others."""
    yield job
    if job.plan.sequence_parallel and job.plan.tp > 1:
        yield job.model_copy(update={"plan": job.plan.model_copy(update={"sequence_parallel": False})})
    if job.model.mtp_layers:
        model = job.model.model_copy(update={"mtp_layers": 0})
        yield job.model_copy(update={"model": model})


def near_job(job: JobSpec, back: JobSpec, differing: list[tuple[str, Any, Any]]) -> JobSpec | None:
    """The job with the values that came `back` from a system, which are `differing`; None if that is no job."""
    plan = back.plan.model_copy(update={name: getattr(job.plan, name) for name in UNSEARCHED if name != "compress"})
    plan = plan.model_copy(update={"compress_rank": 4, "compress_share": 0.01})
    near = job.model_copy(
        update={"plan": plan, "batch": back.batch, "precision": back.precision, "optimizer": back.optimizer}
    )
    of_model = {name: settings for name, _, settings in differing if name.startswith("model.")}
    if of_model:
        changed = None if None in of_model.values() else with_fields(near, of_model)
        if changed is None:
            return None
        near = changed
    return None if job_faults(near) else near


def way_to(job: JobSpec, near: JobSpec, more_faults: Callable[[JobSpec], list[str]] = lambda job: []) -> Flat:
    """The fewest fields that make a job mean what the near one does, and that leave it without faults; `more_faults`
    are those that are not seen from here."""
    old, new = _fields_of(job), _fields_of(near)
    fields = {name: new[name] for name in new if name in old and new[name] != old[name]}
    for name in list(fields):
        rest = {one: value for one, value in fields.items() if one != name}
        without = with_fields(job, rest)
        if without is None or differences(without, near):
            continue
        if not job_faults(without) and not more_faults(without):
            fields = rest
    return fields


def with_fields(job: JobSpec, fields: Flat) -> JobSpec | None:
    """The job with other values of fields; None where they are no fields, or have no such values."""
    data = job.model_dump(exclude_unset=True)
    for path, value in fields.items():
        *sections, name = path.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                return None
        place[name] = value
    try:
        return JobSpec.model_validate(data)
    except ValueError:
        return None


def _fields_of(job: JobSpec) -> Flat:
    fields: Flat = {}
    for section in _SECTIONS:
        fields |= flat_keys(getattr(job, section).model_dump(mode="json"), f"{section}.")
    return {name: value for name, value in fields.items() if name != "plan.fallback"}
