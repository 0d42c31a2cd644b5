"""The block of a model."""

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.model.block import Block
from shardwright.model.parallel_block import ParallelBlock
from shardwright.parallel.tensor.linear import LayerSharding


def make_block(spec: ModelSpec, number: int, cut: LayerSharding, policy: Policy = KEEP_ALL) -> Block:
    """Block `number` of a model, of the kind that the model has."""
    kind = Block if spec.parallel_block == "none" else ParallelBlock
    return kind(spec, number, cut, policy)
