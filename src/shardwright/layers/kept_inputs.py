"""The inputs that products and norms keep for their backward: how often, and in how many bytes an element.

Software may cast inputs to fp8, or have float32 between products that it casts to 16 bits (autocast).
"""

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_operators import LayerOperator
from shardwright.layers.layer_tensors import FLOAT32, HALF
from shardwright.layers.query import PlanGrid


def between_bytes(software: SoftwareSpec) -> int:
    """Bytes of an element between products: of the residual stream, and of what norms give."""
    return FLOAT32 if software.autocast else HALF


def input_bytes(grid: PlanGrid, software: SoftwareSpec) -> int:
    """Bytes of an element of a product's input as the product keeps it."""
    in_float8 = NUMBER_TYPES[grid.precision].peak == "float8"
    return software.float8_inputs if in_float8 else HALF


def norm_kept(shape: ModelShape, software: SoftwareSpec) -> float:
    """Bytes by element that a norm keeps. In float32 it keeps its input, one of single operators twice as much."""
    kept = HALF if shape.layer_norm else software.norm_kept
    return FLOAT32 * (1 + (kept > HALF)) if software.autocast else kept


def num_entries(shape: ModelShape, software: SoftwareSpec, enter: LayerOperator) -> int:
    """The number of times that tp ranks gather what `enter` brings to its products, and sum its gradient: once, or for
    each product."""
    return _num_products(shape, enter) if software.enters_apart else 1


def _num_products(shape: ModelShape, enter: LayerOperator) -> int:
    """Column-parallel products of one input, where query, key and value, and gate and up, are products of their own."""
    return {"attention enter": 3, "mlp enter": 1 + shape.gated}.get(enter.name, 1)


def num_kept_inputs(shape: ModelShape, grid: PlanGrid, software: SoftwareSpec, enter: LayerOperator) -> Numbers:
    """The number of kept copies of the input that `enter` brings to its products: one, and none for shared experts,
    whose input the router keeps. Software that copies inputs has a copy for each product, if tp ranks have all tokens;
    so has software that gathers for each product apart and keeps that, if they share them. Under autocast each product
    casts it, but in compiled layers all share one cast."""
    if enter.name == "shared enter":
        return 0.0
    is_whole = ~np.asarray(grid.sequence_parallel, dtype=bool)
    # A product keeps what it gathered, unless it is gathered again.
    is_gathered = software.enters_apart & (not software.gathers_again) & ~is_whole
    is_copied = ((software.copies_inputs & is_whole) | is_gathered) & (np.asarray(grid.tp) > 1)
    return np.where(is_copied | (software.autocast and not software.compiled), _num_products(shape, enter), 1)
