"""The job nearest to a job that a system lacks, and the fields to change to get it."""

from collections.abc import Callable, Iterator
from typing import Any

from shardwright.config.checks.check import job_faults
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.plan import UNSEARCHED
from shardwright.interchange.meaning import differences
from shardwright.interchange.reading.settings import Flat

_SECTIONS = ("model", "plan", "batch", "precision", "optimizer")


def variants(job: JobSpec) -> Iterator[JobSpec]:
    """The job itself, and variants without sequence parallelism or MTP layers, which limit what else a system has."""
    yield job
    if job.plan.sequence_parallel and job.plan.tp > 1:
        yield job.model_copy(update={"plan": job.plan.model_copy(update={"sequence_parallel": False})})
    if job.model.mtp_layers:
        model = job.model.model_copy(update={"mtp_layers": 0})
        yield job.model_copy(update={"model": model})


def near_job(job: JobSpec, back: JobSpec, differing: list[tuple[str, Any, Any]]) -> JobSpec | None:
    """The job with the values of `back`, the job that was read back from a system's files; None if it is not valid.

    `differing` are the differences of the two: name, value in `job`, value in `back`.
    """
    plan = back.plan.model_copy(update={name: getattr(job.plan, name) for name in UNSEARCHED if name != "compress"})
    plan = plan.model_copy(update={"compress_rank": 4, "compress_share": 0.01})
    near = job.model_copy(
        update={"plan": plan, "batch": back.batch, "precision": back.precision, "optimizer": back.optimizer}
    )
    model_values = {name: value for name, _, value in differing if name.startswith("model.")}
    if model_values:
        changed = None if None in model_values.values() else with_fields(near, model_values)
        if changed is None:
            return None
        near = changed
    return None if job_faults(near) else near


def way_to(job: JobSpec, near: JobSpec, more_faults: Callable[[JobSpec], list[str]] = lambda job: []) -> Flat:
    """The fewest fields to set so that `job` means the same as `near` and has no faults.

    `more_faults` returns the faults that the checks of this package do not see.
    """
    old, new = _fields_of(job), _fields_of(near)
    fields = {name: new[name] for name in new if name in old and new[name] != old[name]}
    for name in list(fields):
        fewer = {other: value for other, value in fields.items() if other != name}
        without = with_fields(job, fewer)
        if without is None or differences(without, near):
            continue
        if not job_faults(without) and not more_faults(without):
            fields = fewer
    return fields


def with_fields(job: JobSpec, fields: Flat) -> JobSpec | None:
    """The job with other values of some fields; None if a name is no field, or a value is not valid."""
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
