"""Shapes of the parts of a tensor, as a layout table says."""

from collections.abc import Mapping

from shardwright.config.plan import split_evenly
from shardwright.sharding.placements import BUFFER, TensorLayout


def local_shape(layout: TensorLayout, state: str, index: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the part of a rank that stands at `index` on each axis; 0 where it is not said."""
    shape = list(layout.shape)
    for placement in layout.states[state]:
        if placement.kind == "shard":
            assert placement.dim != BUFFER, "a range of rows of many tensors has no shape of its own"
            first, end = split_evenly(shape[placement.dim], placement.size, index.get(placement.axis, 0))
            shape[placement.dim] = end - first
    return tuple(shape)
