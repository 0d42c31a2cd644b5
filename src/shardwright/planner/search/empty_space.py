"""Faults of constraints that leave a search no plan: the field that is kept, and values that may be kept instead."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import any_of, fixed, say
from shardwright.config.recompute_facts import RECOMPUTES, searched_recomputes
from shardwright.config.registry import Registry
from shardwright.config.schedule_facts import SCHEDULES, searched
from shardwright.planner.search import space
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import Columns, select


def _searched_recomputes() -> tuple[str, ...]:
    return tuple(facts.name for facts in searched_recomputes())


# Fields some of whose values no search tries, each with the registry of its values and the values that one tries.
_REGISTRIES: dict[str, tuple[Registry[Any], Callable[[], tuple[str, ...]]]] = {
    "schedule": (SCHEDULES, searched),
    "recompute": (RECOMPUTES, _searched_recomputes),
}


def empty_space_faults(job: JobSpec, constraints: Constraints, rows: Columns) -> list[str]:
    """Sentences with the reasons why no plan of a job meets the constraints; empty if some plan does.

    `rows` are the degrees that meet them.
    """
    unsearched = list(_unsearched_values(constraints))
    if unsearched or _has_plans(job, constraints, rows):
        return unsearched
    faults = list(_alone_too_narrow(job, constraints))
    if faults:
        return faults
    extra = say(", or keep less") if _held_fields(constraints) else ""
    if constraints.among:
        fields = tuple(f"plan.{name}" for name in constraints.among)
        extra = say(", a system that has more values of {fields}{extra}", fields=fields, extra=extra)
    return [
        say(
            "none is legal: dp x tp x pp x cp must be {devices}, dp must divide the batch of {batches}, tp the "
            "{kv_heads} kv heads, and pp leave a layer of {layers} to each stage; use another "
            "batch.global_batch_size{extra}",
            devices=job.cluster.num_devices,
            batches=any_of([str(batch) for batch in constraints.batches(job.batch.global_batch_size)]),
            kv_heads=job.model.num_kv_heads,
            layers=job.model.layers,
            extra=extra,
        )
    ]


def _has_plans(job: JobSpec, constraints: Constraints, rows: Columns) -> bool:
    return bool(len(rows["dp"])) and any(space.count_by_variant(job, constraints, rows).values())


def _unsearched_values(constraints: Constraints) -> Iterator[str]:
    for field, (registry, searched_values) in _REGISTRIES.items():
        value = constraints.keep.get(field, "")
        if value in registry and registry[value].not_searched:
            yield (
                say(
                    "plan.{field}={value} is kept, and no search tries it, for {reason}; keep one of {choices}, or "
                    "write it into the job's own plan and ask `shardwright estimate`",
                    field=field,
                    value=value,
                    reason=fixed(registry[value].not_searched),
                    choices=tuple(searched_values()),
                )
            )


def _held_fields(constraints: Constraints) -> list[str]:
    """The fields that the user constrains, by value or by range."""
    return list(dict.fromkeys((*constraints.keep, *constraints.between)))


def _without(constraints: Constraints, name: str) -> Constraints:
    keep: dict[str, Any] = {field: value for field, value in constraints.keep.items() if field != name}
    between = {field: ends for field, ends in constraints.between.items() if field != name}
    return replace(constraints, keep=keep, between=between)


def _alone_too_narrow(job: JobSpec, constraints: Constraints) -> Iterator[str]:
    """Yield a sentence for each constrained field without which there are plans, with values of it that allow some."""
    for name in _held_fields(constraints):
        if name in constraints.keep and name in constraints.between:
            low, high = constraints.between[name]
            if not low <= constraints.keep[name] <= high:
                kept = _as_typed(constraints.keep[name])
                yield say(
                    "plan.{name}={kept} is kept, and --between plan.{name}={low},{high} excludes it; leave one out",
                    name=name,
                    kept=kept,
                    low=low,
                    high=high,
                )
                continue
        freer = _without(constraints, name)
        rows = space.degrees(job, freer)
        if not _has_plans(job, freer, rows):
            continue
        held_text = (
            f"plan.{name}={_as_typed(constraints.keep[name])}"
            if name in constraints.keep
            else say("a range of plan.{name}", name=name)
        )
        others = [other for other in _held_fields(constraints) if other != name]
        beside_text = ""
        if others:
            fields = tuple(f"plan.{other}" for other in others)
            beside_text = say(" beside {fields} as kept", fields=fields)
        way_out = _way_out(job, freer, rows, name)
        yield say(
            "no plan has {field}{others}{product}; {way_out}",
            field=held_text,
            others=beside_text,
            product=_product_text(job, constraints) if name in _RANK_AXES else "",
            way_out=way_out,
        )


_RANK_AXES = ("dp", "tp", "pp", "cp")


def _product_text(job: JobSpec, constraints: Constraints) -> str:
    """The product of the degrees that are kept, if they can't be those of so many devices; else empty."""
    degrees = {axis: constraints.keep[axis] for axis in _RANK_AXES if axis in constraints.keep}
    product, devices = math.prod(degrees.values()), job.cluster.num_devices
    is_possible = product == devices if len(degrees) == len(_RANK_AXES) else devices % product == 0
    if len(degrees) < 2 or is_possible:
        return ""
    words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    return say(" ({degrees} = {product:,} ranks, of {devices:,})", degrees=words, product=product, devices=devices)


def _as_typed(value: Any) -> str:
    """A value in the syntax of `--keep`."""
    return value if isinstance(value, str) else json.dumps(value)


def _way_out(job: JobSpec, freer: Constraints, rows: Columns, name: str) -> str:
    """Text with the values of a field for which there are plans, or the advice not to keep it."""
    values: list[Any]
    if name in rows:
        row_values = sorted({value.item() for value in rows[name]})
        values = [value for value in row_values if _has_plans(job, freer, select(rows, rows[name] == value))]
    else:
        counts = space.count_by_variant(job, freer, rows)
        has_plans = [variant for variant, count in counts.items() if count]
        values = list(dict.fromkeys(getattr(variant, name) for variant in has_plans if hasattr(variant, name)))
    if not values or name == "order":
        return say("do not keep plan.{name}", name=name)
    shown = (*map(_as_typed, values[:12]), *(["..."] if len(values) > 12 else []))
    return say("use one of {shown}, or do not keep plan.{name}", shown=shown, name=name)


def refuse_no_cluster(job: JobSpec) -> None:
    """Raise PlanError if the devices of a search are unknown."""
    faults = []
    if job.cluster.parts:
        faults.append(
            say(
                "cluster.parts has devices of several kinds, and this search is of one; `shardwright layout JOB "
                "--search` finds a plan for parts"
            )
        )
    elif job.cluster.device == "unknown":
        faults.append(
            say(
                "cluster.device is unknown, so no plan has a price; name it with --device, such as h100-sxm "
                "(`shardwright devices` lists them)"
            )
        )
    if job.cluster.num_devices == 0:
        faults.append(
            say(
                "nothing says how many devices there are; say --devices, such as --devices {example}, or set "
                "cluster.devices_per_node and cluster.nodes",
                example=job.plan.world if job.plan.world > 1 else 8,
            )
        )
    if faults:
        raise PlanError(say("job {name}", name=job.name), faults)
