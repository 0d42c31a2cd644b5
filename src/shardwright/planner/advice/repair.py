"""A plan that does not fit: its excess and the rank with it; and the nearest plans that fit.

A search finds them while most fields of the plan are kept: it frees each field alone, then each two of them. So no plan
with as few changes is faster. Where that leaves few of them, or slow ones, the fastest plan with all fields free may be
one more.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.cluster_facts import host_room_bytes, node_devices
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.memory.job_memories import fullest, job_memories
from shardwright.memory.rank_estimate import Memory
from shardwright.planner.advice.neighbours import recompute_words
from shardwright.planner.search.adjacent_plans import numbers_of_plan, variant_of_plan
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import RECOMPUTATION
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.planner.search.results import SimulatedPlan
from shardwright.planner.search.search import search
from shardwright.simulate.batch_pricing import Price
from shardwright.simulate.closed_form import step_time

_SLOWEST = 4.0  # times the step of the plan that does not fit: slower plans are no repair
_SLOW = 1.1  # times that step: worth a search through all plans
_SHOWN = 4
_LOOKED_AT = 8  # plans of a search of which some may not be admitted
# Fields that change together, by the name that is shown: a degree changes the number of replicas, and tp the fields
# about its ranks.
_CHANGES: dict[str, tuple[str, ...]] = {
    "microbatch_size": ("microbatch_size",),
    "recompute": RECOMPUTATION,
    "zero": ("zero", "zero_ranks"),
    "tp": ("tp", "dp", "sequence_parallel", "expert_tp"),
    "pp": ("pp", "dp", "virtual_stages"),
    "cp": ("cp", "dp", "cp_method"),
    "ep": ("ep", "expert_tp"),
    "schedule": ("schedule", "virtual_stages"),
    "sequence_parallel": ("sequence_parallel", "expert_tp"),
    "offload": ("offload_optimizer", "offload_parameters"),
    "order": ("order",),
    "dispatch": ("dispatch",),
}
_FOLLOWING = ("dp", "expert_tp", "order", "cp_method", "offload_activations", "recompute_operators", "recompute_every")


@dataclass(frozen=True)
class Near:
    """A plan that fits: its changes in words, the job under it, and its price."""

    changes: tuple[str, ...]
    job: JobSpec
    price: Price


@dataclass(frozen=True)
class Limits:
    """Limits of the plans that may be proposed: the values that fields may have, beside those that are kept, and a test
    of a whole plan; none by default."""

    among: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    admit: Callable[[JobSpec], bool] = lambda job: True


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Misfit:
    """The excess of a plan that does not fit: the number of ranks that need too much, the rank that needs most, its
    memory and its excess; and plans that fit.

    `excess_bytes` is of the device, and `host_excess_bytes` of a device's share of its node's host memory. One of them
    may be negative: that much is free.
    """

    rank: int
    num_ranks: int
    memory: Memory
    excess_bytes: float
    host_excess_bytes: float
    nearest: list[Near]


def misfit(job: JobSpec, schedules: tuple[str, ...], constants: Constants, limits: Limits = NO_LIMITS) -> Misfit | None:
    """The excess of a plan, and plans that fit; None if the plan itself fits."""
    room = room_bytes(job)
    ranks = job_memories(job, constants)
    fullest_rank = max(range(len(ranks)), key=lambda rank: float(ranks[rank].process))
    excess, host_excess = float(ranks[fullest_rank].process) - room, -math.inf
    if excess <= 0:
        fullest_rank = max(range(len(ranks)), key=lambda rank: float(ranks[rank].host))
        host_excess = float(ranks[fullest_rank].host) - host_room_bytes(job.cluster)
        excess = float(ranks[fullest_rank].process) - room
    if max(excess, host_excess) <= 0:
        return None
    too_large = sum(not fits(job, memory, room) for memory in ranks)
    nearest = nearest_that_fit(job, schedules, constants, _SHOWN, limits=limits)
    return Misfit(fullest_rank, too_large, ranks[fullest_rank], excess, host_excess_bytes=host_excess, nearest=nearest)


def nearest_that_fit(
    job: JobSpec,
    schedules: tuple[str, ...],
    constants: Constants,
    num_shown: int,
    *,
    with_fastest: bool = False,
    limits: Limits = NO_LIMITS,
) -> list[Near]:
    """The plans that fit with the fewest changes, fastest first; without plans that are much slower than the job's
    own. `with_fastest`: if plans with one change are fewer than `num_shown`, or slow, the fastest of all is among them.
    """
    own_s = float(step_time(run_of(job), constants).total)
    most_s = _SLOWEST * own_s
    most_token_s = most_s / job.tokens_per_step
    memo, plan_fields = Memo(), _plan_fields(job)

    def fastest(names: Iterable[str], count: int, most_token_s: float) -> list[SimulatedPlan]:
        free = {field for name in names for field in _CHANGES[name]}
        kept = {field: value for field, value in plan_fields.items() if field not in free}
        among = {name: had for name, had in limits.among.items() if name not in kept}
        among["schedule"] = tuple(name for name in schedules if name in among.get("schedule", schedules))
        looked_at = count if limits is NO_LIMITS else max(count, _LOOKED_AT)
        plans = _fastest(job, Constraints(kept, among=among), constants, memo, looked_at, most_token_s)
        return [plan for plan in plans if float(plan.time.total) <= most_s and limits.admit(plan.job)][:count]

    def with_changes(number: int) -> list[SimulatedPlan]:
        """The fastest plan of each choice of fields, but of plans that are slower than `num_shown` others not all."""
        fitting: dict[str, SimulatedPlan] = {}
        for names in combinations(_CHANGES, number):
            shown_s = sorted(plan.token_s for plan in fitting.values())[:num_shown]
            limit_s = shown_s[-1] if len(shown_s) == num_shown else most_token_s
            fitting |= {plan.job.plan.model_dump_json(): plan for plan in fastest(names, 1, limit_s)}
        return list(fitting.values())

    plans, best_plans = with_changes(1), list[SimulatedPlan]()
    if plans:
        few_or_slow = len(plans) < num_shown or min(float(plan.time.total) for plan in plans) > _SLOW * own_s
        if with_fastest and few_or_slow:
            best_plans = fastest(_CHANGES, num_shown, most_token_s)
    else:
        best_plans = fastest(_CHANGES, num_shown, most_token_s)
        plans = with_changes(2) if best_plans else []  # if no plan fits, two changes do not help
        if not plans:
            return list(_near_plans(job, sorted(best_plans, key=_token_s), constants))
        if not with_fastest:
            best_plans = []
    plans = sorted(plans, key=_token_s)[: num_shown - bool(best_plans)]
    known_plans = [plan.job.plan for plan in plans]
    plans += [plan for plan in best_plans if plan.job.plan not in known_plans][:1]
    return list(_near_plans(job, sorted(plans, key=_token_s), constants))


def _token_s(plan: SimulatedPlan) -> float:
    return plan.token_s


def _plan_fields(job: JobSpec) -> dict[str, object]:
    """The fields of a job's plan that a search may keep."""
    variant = variant_of_plan(job).fields()
    return {name: value for name, value in (numbers_of_plan(job) | variant).items() if name != "global_batch_size"} | {
        "order": job.plan.order,
        "zero_ranks": job.plan.zero_ranks,
    }


def _fastest(
    job: JobSpec, constraints: Constraints, constants: Constants, memo: Memo, num_shown: int, most_token_s: float
) -> list[SimulatedPlan]:
    try:
        plans = search(
            _on_a_cluster(job), constraints, constants, num_shown, memo=memo, most_token_s=most_token_s
        ).candidates
    except PlanError:  # no plan is legal
        return []
    return [replace(plan, job=plan.job.model_copy(update={"cluster": job.cluster})) for plan in plans]


def _on_a_cluster(job: JobSpec) -> JobSpec:
    """The job on as many devices as its plan has ranks, in nodes of the usual size, if its cluster has no size."""
    if job.cluster.num_devices:
        return job
    node_size = math.gcd(job.plan.world, node_devices(job.cluster))
    size = {"devices_per_node": node_size, "nodes": job.plan.world // node_size}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=size)})


def _near_plans(job: JobSpec, plans: Sequence[SimulatedPlan], constants: Constants) -> Iterator[Near]:
    """Yield the plans that have changes, with these and their prices, in the same order."""
    for plan in plans:
        changes = _changes(job, plan.job)
        if changes:
            yield Near(changes, plan.job, Price(plan.time, fullest(plan.job, constants)))


def _changes(job: JobSpec, other_job: JobSpec) -> tuple[str, ...]:
    """The fields in which two plans differ, with the values of the other plan; without fields that follow from
    others."""
    own_fields, other_fields = (
        numbers_of_plan(job) | variant_of_plan(job).fields(),
        numbers_of_plan(other_job) | variant_of_plan(other_job).fields(),
    )
    changed = [
        name for name, value in other_fields.items() if value != own_fields[name] and name != "global_batch_size"
    ]
    stated = [name for name in changed if name not in _FOLLOWING] or changed
    recompute_fields = {name for name in changed if name in _CHANGES["recompute"]}
    if recompute_fields and "recompute" not in stated:
        stated = [*(name for name in stated if name not in recompute_fields), "recompute"]
    layout = (say("uneven stages"),) if other_job.plan.layout and other_job.plan.layout != job.plan.layout else ()
    return (*(_in_words(name, other_job) for name in stated), *layout)


def _in_words(name: str, job: JobSpec) -> str:
    if name == "recompute":
        return f"recompute {recompute_words(job.plan)}"
    value = getattr(job.plan, name)
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
