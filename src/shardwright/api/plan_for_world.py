"""The plan for the number of ranks that torchrun has started, where it is not the plan's: it may be elastic."""

import itertools
from typing import TYPE_CHECKING

from shardwright.api.asked_job import planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwright.config.job import JobSpec
    from shardwright.config.plan import FallbackSpec, PlanSpec


def for_world(spec: "JobSpec", world: int) -> "tuple[JobSpec, str]":
    """The job under a plan of `world` ranks, and a sentence that says which, empty where it is its own.

    The first of plan.fallback that has so many ranks, else what the planner recommends for so many devices of the job's
    cluster. PlanError with the arithmetic, and a fallback to write, where there is neither.
    """
    from shardwright.config.base import PlanError
    from shardwright.config.units import counted
    from shardwright.report.plans_text import plan_words

    if spec.plan.world == world:
        return spec, ""
    ranks = f"{counted(world, 'rank')} {'was' if world == 1 else 'were'} started"
    instead = f"{ranks}, and the plan is for {spec.plan.world}"
    for number, fallback in enumerate(spec.plan.fallback):
        if fallback.world == world:
            found = planned(f"job {spec.name}", spec.model_copy(update={"plan": spec.plan.fallback_plan(number)}))
            return found, f"{instead}: this is plan.fallback[{number}], {plan_words(found.plan)}"
    recommended = _recommended(spec, world)
    if recommended is not None:
        return recommended, f"{instead}: this is what `plan` recommends, {plan_words(recommended.plan)}"
    fault = f"{ranks}, and the plan needs {spec.plan.degrees} = {spec.plan.world}"
    if spec.plan.fallback:
        fault += f", plan.fallback {', '.join(str(plan.world) for plan in spec.plan.fallback)}"
    fault += f"; start {spec.plan.world}, or change the plan"
    raise PlanError("launch", [fault + _to_paste(spec, world)])


def _recommended(spec: "JobSpec", world: int) -> "JobSpec | None":
    """The job under the planner's choice; None where nothing is known of its devices, or no plan fits them."""
    from shardwright.config.base import PlanError
    from shardwright.cost.calibration import shipped
    from shardwright.planner.advice.recommendation import plans_of
    from shardwright.planner.scaling import at_size, size_faults
    from shardwright.planner.search.constraints import Constraints

    if size_faults(spec, world):
        return None
    plan = spec.plan.unsearched()
    at = at_size(spec.model_copy(update={"plan": plan}), world, spec.batch.global_batch_size)
    try:
        found = plans_of(at, Constraints(), shipped()).recommendation
    except (KeyError, PlanError):  # of a device that nothing is known of, or that is too few for the model
        return None
    if found is None or found.plan.job.batch != spec.batch:
        return None
    return found.plan.job


def _to_paste(spec: "JobSpec", world: int) -> str:
    """A fallback for so many ranks, ready to be written into the job; empty where the job's other fields allow none."""
    from shardwright.config.base import PlanError
    from shardwright.config.checks.check import faults_on_any_cluster

    for plan in _plans_near(spec.plan, world):
        job = spec.model_copy(update={"plan": plan})
        try:
            if not faults_on_any_cluster(job):
                planned(f"job {spec.name}", job)
                return f", or write in [plan]: {_as_toml(spec.plan.fallback, plan)}"
        except PlanError:
            continue
    return ""


def _plans_near(plan: "PlanSpec", world: int) -> "Iterator[PlanSpec]":
    """Plans of so many ranks that are like one, those that differ in fewer axes first."""
    divisors = [degree for degree in range(1, world + 1) if world % degree == 0] if world <= 2**16 else []
    near = []
    for tp, pp in itertools.product(divisors, divisors):
        if tp * pp * plan.cp <= world and world % (tp * pp * plan.cp) == 0:
            near.append((tp > plan.tp, pp > plan.pp, (tp != plan.tp) + (pp != plan.pp), -tp, -pp, (tp, pp)))
    for *_, (tp, pp) in sorted(near):
        dp = world // (tp * pp * plan.cp)
        degrees = {"dp": dp, "tp": tp, "pp": pp, "fallback": []}
        yield plan.model_copy(update=degrees)
        yield plan.model_copy(
            update=degrees | {"layout": [], "zero_ranks": 0, "ep": 1, "expert_tp": 0, "schedule": "1f1b",
                              "virtual_stages": 1, "extra_warmup": 0}
        )  # fmt: skip


def _as_toml(given: "Sequence[FallbackSpec]", plan: "PlanSpec") -> str:
    """The line of a job that has one more fallback."""
    from shardwright.config.toml_text import value_text

    fields = [fallback.model_dump(exclude_defaults=True) for fallback in given]
    degrees = {name: getattr(plan, name) for name in ("dp", "tp", "pp")}
    return f"fallback = {value_text([*fields, degrees | plan.model_dump(exclude_defaults=True)])}"
