"""The neighbours of a plan: one field changed, and the fields that must change with it so that ranks and batch
match."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.checks.check import job_faults
from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import DEFAULT_ORDER, STAGES_INSIDE, order_words
from shardwright.config.recompute_facts import RECOMPUTES, optional_recompute_fields, searched_recomputes
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.cost.calibration import device_of
from shardwright.planner.search.adjacent_plans import same_stages
from shardwright.planner.search.space import placement_differs
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.groups import REPLICAS, layout, of_stage


@dataclass(frozen=True)
class Neighbour:
    """A legal neighbour of a plan: the field that changed, its value, and the job under it."""

    field: str
    value: object
    job: JobSpec


def neighbours(job: JobSpec, schedules: tuple[str, ...]) -> list[Neighbour]:
    """All neighbours of a job's plan on as many devices; other schedules are among `schedules`.

    Skip a neighbour that needs a feature that the software does not have and the current plan does not need. A custom
    layer split is kept if every rank still holds the same stages.
    """
    legal_neighbours, known_plans = [], {job.plan.model_dump_json()}
    software = software_of(job.cluster.software)
    missing_in_plan = set(missing_features(software, job))
    for field, value, changes in _moves(job, schedules):
        if all(getattr(job.plan, name) == new for name, new in changes.items()):
            continue  # the plan itself
        plan = job.plan.model_copy(update={"extra_warmup": 0, "most_alive": 0.0} | changes)
        if plan.layout and not same_stages(job.plan, plan):
            plan = plan.model_copy(update={"layout": []})
        adjacent_job = job.model_copy(update={"plan": plan})
        text = plan.model_dump_json()
        if (
            text in known_plans
            or not set(missing_features(software, adjacent_job)) <= missing_in_plan
            or job_faults(adjacent_job)
            or plan_faults(adjacent_job)
        ):
            continue
        known_plans.add(text)
        legal_neighbours.append(Neighbour(field, value, adjacent_job))
    return legal_neighbours


def _moves(job: JobSpec, schedules: tuple[str, ...]) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """Yield (field, value, all changes). Some may be illegal."""
    plan = job.plan
    for axis in ("tp", "pp", "cp"):
        for double in (False, True):
            yield from _rescale_axes(job, axis, double)
    for ep in {plan.ep * 2, plan.ep // 2} - {0}:
        yield "ep", ep, {"ep": ep}
    for zero in range(4):
        zero_ranks_change = {"zero_ranks": 0} if zero == 0 else {}
        offloads = plan.offload_parameters and zero == 3
        yield "zero", zero, {"zero": zero, "offload_parameters": offloads} | zero_ranks_change
    if plan.zero:
        ranks_on_node = of_stage(plan, node_devices(job.cluster)) // layout(plan, REPLICAS[False]).stride
        if plan.zero_ranks or ranks_on_node > 1:  # with one rank nothing is sharded
            num_ranks = 0 if plan.zero_ranks else ranks_on_node
            yield "zero_ranks", num_ranks, {"zero_ranks": num_ranks}
    for order in (DEFAULT_ORDER, STAGES_INSIDE):
        reordered = plan.model_copy(update={"order": order})
        if placement_differs(job, plan, reordered):
            yield "order", order_words(reordered), {"order": order}
    yield from _schedule_moves(job, schedules) if plan.pp > 1 else ()
    plain = {name: getattr(PlanSpec(), name) for name in optional_recompute_fields()}
    for facts in (facts for facts in searched_recomputes() if facts.is_simple):
        yield "recompute", facts.name, plain | {"recompute": facts.name}
    for size in (plan.microbatch_size * 2, plan.microbatch_size // 2):
        if size:
            yield "microbatch_size", size, {"microbatch_size": size}
    whole_experts = {"expert_tp": 0} if plan.sequence_parallel else {}
    sequence_changes = {"sequence_parallel": not plan.sequence_parallel} | whole_experts
    if plan.tp > 1:
        yield "sequence_parallel", not plan.sequence_parallel, sequence_changes
    if plan.offload_optimizer or device_of(job.cluster.device).knows_host:
        yield "offload_optimizer", 1.0 - plan.offload_optimizer, {"offload_optimizer": 1.0 - plan.offload_optimizer}


def _schedule_moves(job: JobSpec, schedules: tuple[str, ...]) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """Yield the schedules of a pipeline, and other numbers of stages on a rank."""
    plan = job.plan
    for schedule in schedules:
        has_free_stages = SCHEDULES[schedule].stages_per_rank == 0
        for virtual in sorted({2, max(2, job.model.layers // plan.pp)}) if has_free_stages else (1,):
            name = stages_words(schedule, virtual) if has_free_stages else schedule
            yield "schedule", name, {"schedule": schedule, "virtual_stages": virtual}
    if SCHEDULES[plan.schedule].stages_per_rank == 0:
        for virtual in {plan.virtual_stages * 2, plan.virtual_stages // 2, plan.virtual_stages + 1}:
            yield "virtual_stages", virtual, {"virtual_stages": virtual}


def stages_words(schedule: str, virtual_stages: int) -> str:
    """A schedule with its number of stages on a rank."""
    return say("{schedule} with virtual_stages {stages}", schedule=schedule, stages=virtual_stages)


def recompute_words(plan: PlanSpec) -> str:
    """The recomputation of a plan: "none", "selective norm+activation", "full every 2"."""
    chooses_operators = "recompute_operators" in RECOMPUTES[plan.recompute].reads
    operators = f" {'+'.join(plan.recompute_operators)}" if chooses_operators else ""
    every = f" every {plan.recompute_every}" if plan.recompute_every > 1 else ""
    return f"{plan.recompute}{operators}{every}"


def _rescale_axes(job: JobSpec, axis: str, double: bool) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """Yield `axis` doubled with another degree halved, or halved with another degree doubled: dp, or else pp or tp."""
    plan = job.plan
    value = getattr(plan, axis) * 2 if double else getattr(plan, axis) // 2
    if value == 0 or (not double and getattr(plan, axis) % 2):
        return
    for other_axis in ("dp", *(other for other in ("pp", "tp") if other != axis)):
        degree = getattr(plan, other_axis)
        if double and degree % 2:
            continue
        changes: dict[str, Any] = {axis: value, other_axis: degree // 2 if double else degree * 2}
        if changes.get("tp", plan.tp) == 1:
            changes |= {"sequence_parallel": False, "expert_tp": 0}
        pp = changes.get("pp", plan.pp)
        if pp == 1:
            changes |= {"schedule": "1f1b", "virtual_stages": 1}
        elif SCHEDULES[plan.schedule].stages_per_rank == 0:
            changes["virtual_stages"] = max(2, min(plan.virtual_stages, job.model.layers // pp))
        if other_axis != "dp":  # the value names both degrees that change
            both_degrees = say("{value} and {axis} {other}", value=value, axis=other_axis, other=changes[other_axis])
            yield axis, both_degrees, changes
        else:
            yield axis, value, changes
