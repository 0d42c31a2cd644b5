"""The weight gradient dy^T x in fp8: what is contracted there are tokens, so scales are along them.

A scale a tensor serves each direction, and is the one that the operand had in the other products. Rows and tiles are
found anew along the tokens: of dy as it came, and of x as it was kept, whose tiles along the inputs are widened first
(DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2; scales are powers of two, so widening rounds nothing).

Shape suffixes: T tokens, K inputs, N outputs of this rank.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.config.units import MIB
from shardwright.precision.float8 import E4M3, TILE, Quantised, along_columns
from shardwright.precision.float8_product import product
from shardwright.precision.float8_recipe import Float8Recipe

_BLOCK_BYTES = 32 * MIB  # of a float32 gradient that is there before it is added to the sum


class OperandScales(NamedTuple):
    """Scales that dy and x had in the other products, where one is a tensor's; else nothing."""

    dy: Tensor | None = None
    x: Tensor | None = None


def gradient_blocks(
    recipe: Float8Recipe, dy_TN: Tensor, x_TK: Tensor, scales: OperandScales
) -> Iterator[tuple[slice, Tensor]]:
    """dy^T x, some rows at a time, each summed and given in float32: which rows, and their values."""
    dy_NT = along_columns(dy_TN, recipe.activation, recipe.gradient_dtype, scales.dy)
    x_KT = along_columns(x_TK, recipe.activation, E4M3, scales.x)
    step = rows_of_block(x_TK.shape[1])
    for first in range(0, dy_TN.shape[1], step):
        rows = slice(first, first + step)
        own = dy_NT.scales if recipe.activation == "tensor" else dy_NT.scales[rows]
        yield rows, product(Quantised(dy_NT.values[rows], own, recipe.activation), x_KT, torch.float32)


def tensor_scale(matrix: Quantised) -> Tensor | None:
    """The scale of a matrix, or of each group of its rows, if it serves each direction."""
    return matrix.scales if matrix.granularity == "tensor" else None


def rows_of_block(num_inputs: int) -> int:
    """Rows of a weight's gradient that are computed at a time."""
    return max(TILE, _BLOCK_BYTES // (4 * num_inputs) // TILE * TILE)
