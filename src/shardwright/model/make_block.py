"""The choice of a block's class."""

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.model.block import Block
from shardwright.model.parallel_block import ParallelBlock
from shardwright.model.recomputed_block import RecomputedBlock, RecomputedParallelBlock
from shardwright.parallel.tensor.linear import LayerSharding


def make_block(spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy = KEEP_ALL) -> Block:
    """Block `number` of a model, parallel if the model's blocks are, which recomputes the operators that `policy`
    names."""
    is_parallel = spec.parallel_block != "none"
    if policy == KEEP_ALL:
        return (ParallelBlock if is_parallel else Block)(spec, number, sharding)
    return (RecomputedParallelBlock if is_parallel else RecomputedBlock)(spec, number, sharding, policy)
