"""How often the input of column-parallel products is kept for their weight gradients."""

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_operators import LayerOperator
from shardwright.layers.query import PlanGrid


def num_kept_inputs(shape: ModelShape, grid: PlanGrid, software: SoftwareSpec, enter: LayerOperator) -> Numbers:
    """How often the input that `enter` brings to its products is kept: once, and not for shared experts, whose input
    the router keeps. Software that copies inputs has a copy for each product, if tp ranks have all tokens."""
    if enter.name == "shared enter":
        return 0.0
    num_products = {"attention enter": 3, "mlp enter": 1 + shape.gated}.get(enter.name, 1)
    is_copied = software.copies_inputs & (np.asarray(grid.tp) > 1) & ~np.asarray(grid.sequence_parallel, dtype=bool)
    return np.where(is_copied, num_products, 1)
