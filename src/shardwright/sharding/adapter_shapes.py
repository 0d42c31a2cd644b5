"""The shapes of adapters: of A, which the maps of one matrix share as a stack, and of B, one for each map."""

import math

from shardwright.config.adapter import AdapterSpec
from shardwright.config.matrix import Matrix


def down_shape(spec: AdapterSpec, matrix: Matrix) -> tuple[int, ...]:
    """Shape of A: [maps, rank, inputs], or [experts, maps, rank, inputs] if each expert has a matrix."""
    return (*_experts(matrix), len(spec.targets_of(matrix)), spec.rank, matrix.inner)


def down_std(matrix: Matrix) -> float:
    """Initial deviation of A: that of numbers between -1 / sqrt(inputs) and 1 / sqrt(inputs), as peft draws them."""
    return 1 / math.sqrt(3 * matrix.inner)


def up_shape(spec: AdapterSpec, matrix: Matrix, target: str) -> tuple[int, ...]:
    """Shape of the B of a map: [*outputs of the map, rank], after the experts if each has a matrix."""
    outputs = [*matrix.outputs]
    if matrix.widths:
        outputs[matrix.side_by_side] = matrix.widths[spec.maps(matrix).index(target)]
    return (*_experts(matrix), *outputs, spec.rank)


def _experts(matrix: Matrix) -> tuple[int, ...]:
    return (matrix.experts,) if matrix.experts else ()
