"""The standing of a plan in the whole space, from a sample: the space is too large to be priced.

Variants are drawn in proportion to the number of their plans, spread evenly; then plans are drawn evenly among those of
a drawn variant.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.layers.memo import Memo
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_block import PlanBlock, join_blocks, select
from shardwright.planner.search.plan_price import fits, prices, room_bytes
from shardwright.planner.search.space import (
    admitted,
    count_by_variant,
    degrees,
    with_offload,
    with_sharing,
    with_stages,
)

_NUM_VARIANTS = 16
_NUM_PLANS = 512  # of each of these variants
_SEED = 0


@dataclass(frozen=True)
class Standing:
    """The standing of a plan in a sample: the share of `num_fit` plans that is faster; `num_drawn` were priced."""

    num_drawn: int
    num_fit: int
    share_faster: float


def standing(job: JobSpec, token_s: float, constraints: Constraints, constants: Constants, memo: Memo) -> Standing:
    """The standing of a plan that takes `token_s` seconds a token. `memo` has earlier results for the same model,
    cluster and constants."""
    random = np.random.default_rng(_SEED)
    constraints, _ = within_known(job, constraints)
    rows = degrees(job, constraints)
    counts = count_by_variant(job, constraints, rows)
    ends = np.cumsum(list(counts.values()))
    drawn = (np.arange(_NUM_VARIANTS) + random.random(_NUM_VARIANTS)) / _NUM_VARIANTS * ends[-1]
    drawn_variants, times = np.unique(np.searchsorted(ends, drawn, side="right"), return_counts=True)
    num_drawn = num_fit = num_faster = 0
    for index, how_often in zip(drawn_variants.tolist(), times.tolist(), strict=True):
        variant = list(counts)[index]
        possible = admitted(job, constraints, rows, variant)
        places = {"pp": possible["pp"], "place": np.arange(len(possible["pp"]))}  # millions, so not all columns of each
        plans = with_stages(job, constraints, places, variant)
        plans = select(plans, random.integers(0, len(plans["pp"]), 4 * _NUM_PLANS))
        block = PlanBlock(variant, select(possible, plans.pop("place")) | plans)
        block = _drawn(job, constraints, block, random, count=_NUM_PLANS * how_often)
        memory = peak_memory(block.run(job, memo), constants, memo)
        fitting = block.where(fits(job, memory, room_bytes(job)))
        num_drawn += len(block)
        num_fit += len(fitting)
        if len(fitting):
            num_faster += int((prices(job, fitting, constants, memo).token_s < token_s).sum())
    return Standing(num_drawn, num_fit, num_faster / max(1, num_fit))


def _drawn(
    job: JobSpec, constraints: Constraints, block: PlanBlock, random: np.random.Generator, count: int
) -> PlanBlock:
    """A sample of `count` plans: the plans of a block with all ways to shard or offload their state."""
    sharded = with_sharing(job, constraints, block)
    offloaded = with_offload(constraints, sharded)
    total = len(sharded) + len(offloaded)
    chosen = random.integers(0, total, min(count, total))
    sharded_rows, offloaded_rows = chosen[chosen < len(sharded)], chosen[chosen >= len(sharded)] - len(sharded)
    return join_blocks([sharded.where(sharded_rows), offloaded.where(offloaded_rows)])
