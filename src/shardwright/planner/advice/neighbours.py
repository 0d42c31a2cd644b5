"""The plans beside a plan: one thing changed, and what must change with it for the ranks and the batch to come out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import EXAMPLE, STAGES_INSIDE, order_words
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.software_support import lacks
from shardwright.config.usual_links import node_devices
from shardwright.cost.calibration import device_of
from shardwright.planner.search.adjacent_plans import same_stages
from shardwright.planner.search.space import lies_otherwise
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.groups import REPLICAS, layout, of_stage

_POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Neighbour:
    """A legal plan beside another: the field that changed, its value, and the job under it."""

    field: str
    value: object
    job: JobSpec


def neighbours(job: JobSpec, schedules: tuple[str, ...]) -> list[Neighbour]:
    """All neighbours of a job's plan on as many devices, those with another schedule among `schedules`; none that need
    what the job's software lacks, unless the plan does.

    Where stages lie as before, each keeps its layers.
    """
    neighbours_of, seen = [], {job.plan.model_dump_json()}
    software = software_of(job.cluster.software)
    mine = set(lacks(software, job))
    for field, value, changes in _moves(job, schedules):
        if all(getattr(job.plan, name) == new for name, new in changes.items()):
            continue  # the plan itself
        plan = job.plan.model_copy(update={"extra_warmup": 0, "most_alive": 0.0} | changes)
        if plan.layout and not same_stages(job.plan, plan):
            plan = plan.model_copy(update={"layout": []})
        near = job.model_copy(update={"plan": plan})
        text = plan.model_dump_json()
        if text in seen or not set(lacks(software, near)) <= mine or job_faults(near) or plan_faults(near):
            continue
        seen.add(text)
        neighbours_of.append(Neighbour(field, value, near))
    return neighbours_of


def _moves(job: JobSpec, schedules: tuple[str, ...]) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """(field, value, all changes), of which some may be illegal."""
    plan, layers = job.plan, job.model.layers
    for axis in ("tp", "pp", "cp"):
        for times_two in (False, True):
            yield from _traded(job, axis, times_two)
    for ep in {plan.ep * 2, plan.ep // 2} - {0}:
        yield "ep", ep, {"ep": ep}
    for zero in range(4):
        fewer = {"zero_ranks": 0} if zero == 0 else {}
        yield "zero", zero, {"zero": zero, "offload_parameters": plan.offload_parameters and zero == 3} | fewer
    if plan.zero:
        of_node = of_stage(plan, node_devices(job.cluster)) // layout(plan, REPLICAS[False]).stride
        if plan.zero_ranks or of_node > 1:  # over one rank nothing is shared
            yield "zero_ranks", 0 if plan.zero_ranks else of_node, {"zero_ranks": 0 if plan.zero_ranks else of_node}
    for order in (EXAMPLE, STAGES_INSIDE):
        moved = plan.model_copy(update={"order": order})
        if lies_otherwise(job, plan, moved):
            yield "order", order_words(moved), {"order": order}
    for schedule in schedules if plan.pp > 1 else ():
        chosen = SCHEDULES[schedule].stages_per_rank == 0
        for virtual in sorted({2, max(2, layers // plan.pp)}) if chosen else (1,):
            name = f"{schedule} with virtual_stages {virtual}" if chosen else schedule
            yield "schedule", name, {"schedule": schedule, "virtual_stages": virtual}
    if plan.pp > 1 and SCHEDULES[plan.schedule].stages_per_rank == 0:
        for virtual in {plan.virtual_stages * 2, plan.virtual_stages // 2, plan.virtual_stages + 1}:
            yield "virtual_stages", virtual, {"virtual_stages": virtual}
    for policy in _POLICIES:
        plain = {"recompute_operators": ["attention"], "recompute_every": 1, "offload_activations": False}
        yield "recompute", policy, {"recompute": policy} | plain
    for size in (plan.microbatch_size * 2, plan.microbatch_size // 2):
        if size:
            yield "microbatch_size", size, {"microbatch_size": size}
    whole_experts = {"expert_tp": 0} if plan.sequence_parallel else {}
    other = {"sequence_parallel": not plan.sequence_parallel} | whole_experts
    if plan.tp > 1:
        yield "sequence_parallel", not plan.sequence_parallel, other
    if plan.offload_optimizer or device_of(job.cluster.device).knows_host:
        yield "offload_optimizer", 1.0 - plan.offload_optimizer, {"offload_optimizer": 1.0 - plan.offload_optimizer}


def recompute_words(plan: PlanSpec) -> str:
    """The recomputation of a plan: "none", "selective norm+activation", "full every 2"."""
    operators = f" {'+'.join(plan.recompute_operators)}" if plan.recompute == "selective" else ""
    every = f" every {plan.recompute_every}" if plan.recompute_every > 1 else ""
    return f"{plan.recompute}{operators}{every}"


def _traded(job: JobSpec, axis: str, times_two: bool) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """Twice or half of a degree, for half or twice of another: of dp, or else of pp or tp."""
    plan = job.plan
    value = getattr(plan, axis) * 2 if times_two else getattr(plan, axis) // 2
    if value == 0 or (not times_two and getattr(plan, axis) % 2):
        return
    for other in ("dp", *({"pp", "tp"} - {axis})):
        degree = getattr(plan, other)
        if times_two and degree % 2:
            continue
        changes: dict[str, Any] = {axis: value, other: degree // 2 if times_two else degree * 2}
        if changes.get("tp", plan.tp) == 1:
            changes |= {"sequence_parallel": False, "expert_tp": 0}
        pp = changes.get("pp", plan.pp)
        if pp == 1:
            changes |= {"schedule": "1f1b", "virtual_stages": 1}
        elif SCHEDULES[plan.schedule].stages_per_rank == 0:
            changes["virtual_stages"] = max(2, min(plan.virtual_stages, job.model.layers // pp))
        if other != "dp":  # it says so, for two degrees change
            yield axis, f"{value} and {other} {changes[other]}", changes
        else:
            yield axis, value, changes
