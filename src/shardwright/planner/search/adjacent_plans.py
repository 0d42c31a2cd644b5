"""The plans adjacent to a plan in the space of a search: plans with the same batch and degrees that differ in one
field.

Any other value of the field counts, not only the next one. Some fields count as one: the schedule with its virtual
stages, all fields of recomputation, and all fields of sharding (ZeRO, its ranks, offload).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import number_of
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.planner.search import space
from shardwright.planner.search.bounds import is_paired
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import (
    DEGREES,
    SHARING,
    Column,
    Columns,
    PlanBlock,
    PlanVariant,
    join_blocks,
    select,
)
from shardwright.sharding.stage_placement import placement_of

# Numbers in which a plan and its adjacent plans agree.
_EQUAL_NUMBERS = ("global_batch_size", "tp", "pp", "cp", "dp", "ep")
_ON_DEVICE = {"offload_optimizer": 0.0, "offload_parameters": False}


def adjacent_blocks(
    job: JobSpec, constraints: Constraints, rows: Columns, plans: Sequence[JobSpec], *, variants: Sequence[PlanVariant]
) -> list[PlanBlock]:
    """The legal plans adjacent to `plans`, in blocks; the column `near` has the index of the plan to which each is
    adjacent. `rows` are the degrees of the space, and `variants` those that some row admits."""
    blocks_of: dict[tuple[PlanVariant, bool], list[PlanBlock]] = {}
    for near, plan in enumerate(plans):
        for block in _adjacent_to(job, constraints, rows, variants, plan):
            columns = block.columns | {"near": np.full(len(block), near), "schedule": block.schedule}
            common = replace(block.variant, schedule="1f1b")  # the schedule is a column of blocks that are joined
            hides_experts = job.model.moe.experts > 0 and is_paired(block.variant.schedule)
            blocks_of.setdefault((common, hides_experts), []).append(PlanBlock(common, columns))
    return [join_blocks(blocks) for blocks in blocks_of.values()]


def same_stages(plan: PlanSpec, other: PlanSpec) -> bool:
    """True if each rank holds the same stages under both plans. The stages of `auto` are known only for the same
    schedule."""
    if plan.schedule != other.schedule and "auto" in (plan.schedule, other.schedule):
        return False
    stages, other_stages = (
        placement_of(either.schedule, either.pp, either.stages_per_rank) for either in (plan, other)
    )
    return stages == other_stages


def variant_of_plan(job: JobSpec) -> PlanVariant:
    """The variant of a job's plan."""
    fields = {name: getattr(job.plan, name) for name in PlanVariant.__dataclass_fields__ if name != "float8"}
    fields["recompute_operators"] = tuple(job.plan.recompute_operators)
    return PlanVariant(**fields, float8=job.precision.float8)


def variant_in_space(job: JobSpec, constraints: Constraints) -> PlanVariant:
    """The variant of the space that has a job's plan: where no ranks share a sequence, any method of context
    parallelism is the one under which such plans stand there."""
    variant = variant_of_plan(job)
    return replace(variant, cp_method=space.method_of_one(constraints)) if job.plan.cp == 1 else variant


def numbers_of_plan(job: JobSpec) -> dict[str, float]:
    """The numbers of a job's plan, by the names of a block's columns."""
    plan = job.plan
    numbers = plan.model_dump() | {
        "global_batch_size": job.batch.global_batch_size,
        "expert_tp": plan.expert_tp_size,
        "order": number_of(plan.order),
    }
    return {name: numbers[name] for name in (*DEGREES, "virtual_stages", *SHARING)}


def _adjacent_to(
    job: JobSpec, constraints: Constraints, rows: Columns, variants: Sequence[PlanVariant], plan: JobSpec
) -> Iterator[PlanBlock]:
    """Yield the legal plans adjacent to one plan, a block for each variant."""
    own_variant, numbers = variant_in_space(plan, constraints), numbers_of_plan(plan)
    rows_of_degrees = select(rows, np.all([rows[name] == numbers[name] for name in _EQUAL_NUMBERS], axis=0))
    num_changed = sum(
        (rows_of_degrees[name] != numbers[name]).astype(int) for name in DEGREES if name not in _EQUAL_NUMBERS
    )
    for candidate in variants:
        differs = _num_different(candidate, own_variant)
        if differs > 1:
            continue
        block = space.with_variant(job, constraints, select(rows_of_degrees, num_changed + differs <= 1), candidate)
        columns = block.columns
        num_changes = np.full(len(block), differs)
        num_changes += sum(
            (columns[name] != numbers[name]).astype(int) for name in DEGREES if name not in _EQUAL_NUMBERS
        )
        if candidate.schedule == own_variant.schedule and SCHEDULES[candidate.schedule].stages_per_rank == 0:
            num_changes += columns["virtual_stages"] != numbers["virtual_stages"]
        adjacent = block.where(num_changes == 1)
        if len(adjacent):
            yield _shared_alike(job, constraints, adjacent, numbers)
            may_stay = all(constraints.allows(name, value) for name, value in _ON_DEVICE.items())
            if numbers["offload_optimizer"] and may_stay:  # offloaded state may have room now
                yield _shared_alike(job, constraints, adjacent, numbers | _ON_DEVICE)
        unchanged = block.where(num_changes == 0)
        if len(unchanged):
            shared = space.with_sharing(job, constraints, unchanged)
            yield from (part for part in (shared, space.with_offload(constraints, shared)) if len(part))


def _num_different(variant: PlanVariant, own_variant: PlanVariant) -> int:
    """The number of fields in which variants differ; all fields of recomputation count as one."""
    return (
        (variant.recomputation != own_variant.recomputation)
        + (variant.schedule != own_variant.schedule)
        + (variant.cp_method != own_variant.cp_method)
        + (variant.dispatch != own_variant.dispatch)
        + (variant.float8 != own_variant.float8)
    )


def _shared_alike(job: JobSpec, constraints: Constraints, block: PlanBlock, numbers: dict[str, float]) -> PlanBlock:
    """The plans of a block with the sharding of another plan, if it is legal for them."""
    columns = block.columns | {name: np.full(len(block), numbers[name]) for name in SHARING}
    if not numbers["zero_ranks"]:
        return PlanBlock(block.variant, columns)
    columns["zero_ranks"] = space.hybrid_ranks(job, constraints, columns)
    is_legal: Column = (columns["zero_ranks"] > 0) & (block.num_copies == 1)
    return PlanBlock(block.variant, columns).where(is_legal)


def with_layout_kept(job: JobSpec, adjacent: JobSpec) -> list[JobSpec]:
    """The plan with the layout of an adjacent plan, if that has one and stages lie on the same ranks."""
    plan, adjacent_plan = job.plan, adjacent.plan
    if not adjacent_plan.layout or not same_stages(adjacent_plan, plan):
        return []
    return [job.model_copy(update={"plan": plan.model_copy(update={"layout": list(adjacent_plan.layout)})})]


def with_virtual_stages(plan: PlanSpec, virtual: int, microbatch_size: int) -> PlanSpec:
    """The plan with another number of stages a rank, evenly laid out, and another microbatch."""
    return plan.model_copy(
        update={
            "virtual_stages": virtual,
            "microbatch_size": microbatch_size,
            "extra_warmup": 0,
            "most_alive": 0.0,
            "layout": [],
        }
    )


@partial(kept_by_identity, most=512)
def with_even_stages(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"layout": []})})
