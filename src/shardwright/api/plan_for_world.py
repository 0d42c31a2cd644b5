"""The plan for the number of ranks that torchrun has started, which may differ from the plan's: torchrun is elastic."""

import itertools
from typing import TYPE_CHECKING

from shardwright.api.asked_job import planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwright.config.job import JobSpec
    from shardwright.config.plan import FallbackSpec, PlanSpec


def for_world(spec: "JobSpec", world: int) -> "tuple[JobSpec, str]":
    """The job under a plan of `world` ranks, and a sentence that names the plan, empty for the job's own plan.

    The plan is the first of plan.fallback with so many ranks, or else the plan that the planner recommends for so many
    devices of the job's cluster. If there is neither, PlanError with the arithmetic, and a fallback to write.
    """
    from shardwright.config.base import PlanError
    from shardwright.config.phrase import say
    from shardwright.report.plans_text import plan_words
    from shardwright.train.launch.rank_life import were_started

    if spec.plan.world == world:
        return spec, ""
    started = were_started(world)
    mismatch = say("{started}, and the plan is for {world}", started=started, world=spec.plan.world)
    for number, fallback in enumerate(spec.plan.fallback):
        if fallback.world == world:
            fallback_job = planned(
                f"job {spec.name}", spec.model_copy(update={"plan": spec.plan.fallback_plan(number)})
            )
            note = say(
                "{mismatch}: this is plan.fallback[{number}], {plan}",
                mismatch=mismatch,
                number=number,
                plan=plan_words(fallback_job.plan),
            )
            return fallback_job, note
    recommended = _recommended(spec, world)
    if recommended is not None:
        note = say(
            "{mismatch}: this is what `plan` recommends, {plan}", mismatch=mismatch, plan=plan_words(recommended.plan)
        )
        return recommended, note
    needed = f"{spec.plan.degrees} = {spec.plan.world}"
    if spec.plan.fallback:
        fallbacks = tuple(str(plan.world) for plan in spec.plan.fallback)
        needed = say("{needed}, plan.fallback {fallbacks}", needed=needed, fallbacks=fallbacks)
    fault = say(
        "{started}, and the plan needs {needed}; start {world}, or change the plan",
        started=started,
        needed=needed,
        world=spec.plan.world,
    )
    if lines := _to_paste(spec, world):
        fault = say("{fault}, or write in [plan]: {lines}", fault=fault, lines=lines)
    raise PlanError("launch", [fault])


def _recommended(spec: "JobSpec", world: int) -> "JobSpec | None":
    """The job under the recommended plan; None if nothing is known of its devices, or no plan fits them."""
    from shardwright.config.base import PlanError
    from shardwright.cost.calibration import shipped
    from shardwright.planner.advice.recommendation import plans_of
    from shardwright.planner.scaling import at_size, size_faults
    from shardwright.planner.search.constraints import Constraints

    if size_faults(spec, world):
        return None
    plan = spec.plan.unsearched()
    job = at_size(spec.model_copy(update={"plan": plan}), world, spec.batch.global_batch_size)
    try:
        recommendation = plans_of(job, Constraints(), shipped()).recommendation
    except (KeyError, PlanError):  # the device is unknown, or devices are too few for the model
        return None
    if recommendation is None or recommendation.plan.job.batch != spec.batch:
        return None
    return recommendation.plan.job


def _to_paste(spec: "JobSpec", world: int) -> str:
    """A fallback for `world` ranks, to write into the job; empty if the job's other fields allow none."""
    from shardwright.config.base import PlanError
    from shardwright.config.checks.check import faults_on_any_cluster

    for plan in _plans_near(spec.plan, world):
        job = spec.model_copy(update={"plan": plan})
        try:
            if not faults_on_any_cluster(job):
                planned(f"job {spec.name}", job)
                return _as_toml(spec.plan.fallback, plan)
        except PlanError:
            continue
    return ""


def _plans_near(plan: "PlanSpec", world: int) -> "Iterator[PlanSpec]":
    """Plans of `world` ranks that are similar to a plan; those that differ in fewer axes come first."""
    divisors = [degree for degree in range(1, world + 1) if world % degree == 0] if world <= 2**16 else []
    candidates = []
    for tp, pp in itertools.product(divisors, divisors):
        if tp * pp * plan.cp <= world and world % (tp * pp * plan.cp) == 0:
            candidates.append((tp > plan.tp, pp > plan.pp, (tp != plan.tp) + (pp != plan.pp), -tp, -pp, (tp, pp)))
    for *_, (tp, pp) in sorted(candidates):
        dp = world // (tp * pp * plan.cp)
        degrees = {"dp": dp, "tp": tp, "pp": pp, "fallback": []}
        yield plan.model_copy(update=degrees)
        simple_fields = {"layout": [], "zero_ranks": 0, "ep": 1, "expert_tp": 0}
        simple_fields |= {"schedule": "1f1b", "virtual_stages": 1, "extra_warmup": 0}
        yield plan.model_copy(update=degrees | simple_fields)


def _as_toml(fallbacks: "Sequence[FallbackSpec]", plan: "PlanSpec") -> str:
    """The line `fallback = ...` of the job, with a plan as one more fallback."""
    from shardwright.config.toml_text import value_text

    fields = [fallback.model_dump(exclude_defaults=True) for fallback in fallbacks]
    degrees = {name: getattr(plan, name) for name in ("dp", "tp", "pp")}
    return f"fallback = {value_text([*fields, degrees | plan.model_dump(exclude_defaults=True)])}"
