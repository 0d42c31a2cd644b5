"""The plans beside a plan in the space of a search: of the same batch and degrees, with one field of another value.

Any other value of the field counts, not the next one alone. Some fields count as one: the schedule with its virtual
stages, all that says what is computed again, and all that says how state is shared out (ZeRO, its ranks, offload).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.config.job import JobSpec
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
_AGAIN = ("recompute", "recompute_operators", "recompute_every", "offload_activations")


def adjacent_blocks(job: JobSpec, constraints: Constraints, rows: Columns, plans: Sequence[JobSpec]) -> list[PlanBlock]:
    """The legal plans beside some, in blocks; a column `near` says of which of them. `rows` are the degrees of the
    space."""
    variant = space.variants_of(job, constraints, rows)
    alike: dict[tuple[PlanVariant, bool], list[PlanBlock]] = {}
    for near, plan in enumerate(plans):
        for block in _beside(job, constraints, rows, variant, plan):
            columns = block.columns | {"near": np.full(len(block), near), "schedule": block.schedule}
            common = replace(block.variant, schedule="1f1b")  # the schedule is a column of blocks that are joined
            hides_experts = job.model.moe.experts > 0 and is_paired(block.variant.schedule)
            alike.setdefault((common, hides_experts), []).append(PlanBlock(common, columns))
    return [join_blocks(blocks) for blocks in alike.values()]


def same_stages(plan: PlanSpec, other: PlanSpec) -> bool:
    """True if each rank holds the same stages under both; where `auto` lays them its search says."""
    if plan.schedule != other.schedule and "auto" in (plan.schedule, other.schedule):
        return False
    own, others = (placement_of(either.schedule, either.pp, either.stages_per_rank) for either in (plan, other))
    return own == others


def variant_of_plan(job: JobSpec) -> PlanVariant:
    """The variant of a job's plan."""
    fields = {name: getattr(job.plan, name) for name in PlanVariant.__dataclass_fields__ if name != "float8"}
    fields["recompute_operators"] = tuple(job.plan.recompute_operators)
    return PlanVariant(**fields, float8=job.precision.float8)


def numbers_of_plan(job: JobSpec) -> dict[str, float]:
    """The numbers of a job's plan, as columns of blocks have them."""
    plan = job.plan
    numbers = plan.model_dump() | {
        "global_batch_size": job.batch.global_batch_size, "expert_tp": plan.expert_tp_size,
        "order": number_of(plan.order),
    }  # fmt: skip
    return {name: numbers[name] for name in (*DEGREES, "virtual_stages", *SHARING)}


def _beside(
    job: JobSpec, constraints: Constraints, rows: Columns, variant: list[PlanVariant], plan: JobSpec
) -> Iterator[PlanBlock]:
    """Yield the legal plans adjacent to one plan, a block for each variant."""
    own, numbers = variant_of_plan(plan), numbers_of_plan(plan)
    mine = select(rows, np.all([rows[name] == numbers[name] for name in _EQUAL_NUMBERS], axis=0))
    others = sum((mine[name] != numbers[name]).astype(int) for name in DEGREES if name not in _EQUAL_NUMBERS)
    for at in variant:
        differs = _num_different(at, own)
        if differs > 1:
            continue
        block = space.with_variant(job, constraints, select(mine, others + differs <= 1), at)
        columns = block.columns
        changed = np.full(len(block), differs)
        changed += sum((columns[name] != numbers[name]).astype(int) for name in DEGREES if name not in _EQUAL_NUMBERS)
        if at.schedule == own.schedule and SCHEDULES[at.schedule].stages_per_rank == 0:
            changed += columns["virtual_stages"] != numbers["virtual_stages"]
        kept = block.where(changed == 1)
        if len(kept):
            yield _shared_alike(job, constraints, kept, numbers)
            may_stay = all(constraints.allows(name, value) for name, value in _ON_DEVICE.items())
            if numbers["offload_optimizer"] and may_stay:  # what is offloaded for want of room may have it now
                yield _shared_alike(job, constraints, kept, numbers | _ON_DEVICE)
        same = block.where(changed == 0)
        if len(same):
            shared = space.with_sharing(job, constraints, same)
            yield from (part for part in (shared, space.with_offload(constraints, shared)) if len(part))


def _num_different(variant: PlanVariant, own: PlanVariant) -> int:
    """The number of fields in which variants differ; all fields of recomputation count as one."""
    again = any(getattr(variant, name) != getattr(own, name) for name in _AGAIN)
    fields = ("schedule", "cp_method", "dispatch", "float8")
    return again + sum(getattr(variant, name) != getattr(own, name) for name in fields)


def _shared_alike(job: JobSpec, constraints: Constraints, block: PlanBlock, numbers: dict[str, float]) -> PlanBlock:
    """Plans with their state shared out as one plan has it, where they may."""
    columns = block.columns | {name: np.full(len(block), numbers[name]) for name in SHARING}
    if not numbers["zero_ranks"]:
        return PlanBlock(block.variant, columns)
    columns["zero_ranks"] = space.hybrid_ranks(job, constraints, columns)
    is_legal: Column = (columns["zero_ranks"] > 0) & (block.num_copies == 1)
    return PlanBlock(block.variant, columns).where(is_legal)
