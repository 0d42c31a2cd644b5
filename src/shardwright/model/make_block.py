"""The block of a model."""

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.model.block import Block
from shardwright.model.parallel_block import ParallelBlock
from shardwright.model.recomputed_block import RecomputedBlock, RecomputedParallelBlock
from shardwright.parallel.tensor.linear import LayerSharding


def make_block(spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy = KEEP_ALL) -> Block:
    """Block `number` of a model, of the kind that the model has, which recomputes what `policy` names."""
    is_parallel = spec.parallel_block != "none"
    if policy == KEEP_ALL:
        return (ParallelBlock if is_parallel else Block)(spec, number, sharding)
    return (RecomputedParallelBlock if is_parallel else RecomputedBlock)(spec, number, sharding, policy)
