"""Simpler plans of the degrees that a search returned: a plainer order of work, other sharing, less recomputation.

A search keeps the fastest plan of each kind, and a simpler one of the same kind may be nearly as fast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.rank_order import number_of
from shardwright.config.recompute_facts import searched_recomputes
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import Constants
from shardwright.layers.memo import Memo
from shardwright.planner.search import space
from shardwright.planner.search.adjacent_plans import variant_in_space
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_block import DEGREES, Column, Columns, PlanBlock, PlanVariant, join_blocks, select
from shardwright.planner.search.plan_price import fits, prices
from shardwright.planner.search.results import Candidate

_TIMES = (0.5, 1, 2)  # factors of the microbatch size of the known plan
_KEY_COLUMNS = ("row", "schedule", "zero", "zero_ranks", "offload_optimizer", "offload_parameters")


def simpler_plans(
    job: JobSpec,
    constraints: Constraints,
    known_jobs: Sequence[JobSpec],
    constants: Constants,
    *,
    room: float,
    most_token_s: float,
) -> list[Candidate]:
    """The legal plans near the plans of `known_jobs` that fit in `room` bytes of a device and take at most
    `most_token_s` seconds a token.

    Among plans that differ only in the sizes of microbatches and of stages, only the fastest is returned.
    """
    constraints, _ = within_known(job, constraints)
    memo, candidates = Memo(), list[Candidate]()
    rows = _rows(constraints, known_jobs)
    for block in _blocks(job, constraints, rows, known_jobs):
        priced = prices(job, block, constants, memo)
        fitting = np.broadcast_to(fits(job, priced.memory, room), priced.token_s.shape)
        chosen = np.flatnonzero(fitting & (priced.token_s <= most_token_s))
        candidates += [
            Candidate(block.plan(index, job), float(priced.token_s[index]))
            for index in _fastest(block, priced.token_s, chosen)
        ]
    return candidates


def _rows(constraints: Constraints, known_jobs: Sequence[JobSpec]) -> Columns:
    """The degrees of each plan with some sizes of microbatches; `row` is the index of the plan in `known_jobs`."""
    rows = []
    for row, known_job in enumerate(known_jobs):
        plan, batch = known_job.plan, known_job.batch.global_batch_size
        for size in (int(times * plan.microbatch_size) for times in _TIMES):
            if size and batch % (plan.dp * size) == 0 and constraints.allows("microbatch_size", size):
                numbers = plan.model_dump() | {
                    "global_batch_size": batch,
                    "microbatch_size": size,
                    "expert_tp": plan.expert_tp_size,
                    "order": number_of(plan.order),
                }
                rows.append([row, *(int(numbers[name]) for name in DEGREES)])
    table = np.array(rows, dtype=np.int64).reshape(-1, 1 + len(DEGREES))
    columns: Columns = {name: table[:, index] for index, name in enumerate(("row", *DEGREES))}
    return columns | {"sequence_parallel": columns["sequence_parallel"].astype(bool)}


def _blocks(
    job: JobSpec, constraints: Constraints, rows: Columns, known_jobs: Sequence[JobSpec]
) -> Iterator[PlanBlock]:
    """The simpler plans, in one block for each variant whose schedules may differ."""
    known_variants = [variant_in_space(known_job, constraints) for known_job in known_jobs]
    simple = [PlanVariant(recompute=facts.name) for facts in searched_recomputes() if facts.is_simple]
    policies = {variant.recomputation for variant in (*simple, *known_variants)}
    blocks_of: dict[PlanVariant, list[PlanBlock]] = {}
    for variant in space.variants_of(job, constraints, rows):
        methods = [
            (known.cp_method, known.dispatch, known.float8) == (variant.cp_method, variant.dispatch, variant.float8)
            for known in known_variants
        ]
        matching = select(rows, np.array(methods)[rows["row"]])
        if (
            not SCHEDULES[variant.schedule].is_simple
            or variant.recomputation not in policies
            or not len(matching["dp"])
        ):
            continue
        block = space.with_variant(job, constraints, matching, variant)
        block = block.where(_is_even(job, block.columns))
        columns = block.columns | {"schedule": block.schedule}
        common = replace(variant, schedule="1f1b")
        blocks_of.setdefault(common, []).append(PlanBlock(common, columns))
    for blocks in blocks_of.values():
        block = _shared(job, constraints, join_blocks(blocks), known_jobs)
        if len(block):
            yield block


def _is_even(job: JobSpec, columns: Columns) -> Column:
    """Mask of the plans whose stages all have as many layers, or that have the fewest stages of their kind."""
    stages = columns["pp"] * columns["virtual_stages"]
    return (job.model.layers % stages == 0) | (columns["virtual_stages"] <= 2)


def _shared(job: JobSpec, constraints: Constraints, block: PlanBlock, known_jobs: Sequence[JobSpec]) -> PlanBlock:
    """The plans with every ZeRO stage; hybrid sharding and offload only if the known plan has them."""
    offloads = np.array(
        [known_job.plan.offload_optimizer > 0 or known_job.plan.offload_parameters for known_job in known_jobs]
    )
    is_hybrid = np.array([known_job.plan.zero_ranks > 0 for known_job in known_jobs])
    shared = space.with_sharing(job, constraints, block)
    offloaded = space.with_offload(constraints, shared.where(offloads[shared.columns["row"]]))
    all_shared = join_blocks([shared, offloaded])
    keeps_hybrid = "zero_ranks" in constraints.keep
    return all_shared.where(
        (all_shared.columns["zero_ranks"] == 0) | is_hybrid[all_shared.columns["row"]] | keeps_hybrid
    )


def _fastest(block: PlanBlock, token_s: Column, chosen: Column) -> list[int]:
    """The indices in `chosen` of the fastest among plans that differ only in sizes."""
    order = chosen[np.argsort(token_s[chosen], kind="stable")]
    table = np.stack([block.columns[name][order].astype(float) for name in _KEY_COLUMNS], axis=1)
    _, first_of_each = np.unique(table, axis=0, return_index=True)
    return [int(order[index]) for index in np.sort(first_of_each)]
