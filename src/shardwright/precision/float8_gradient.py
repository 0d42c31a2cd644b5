"""The weight gradient dy^T x in fp8: the product contracts tokens, so scales are along tokens.

Both operands are the casts of the other products, so that nothing in 16 bits is kept for this product, even if it is
deferred. A scale for the tensor serves both directions. Rows and tiles are dequantised, which is exact since scales are
powers of two, and cast again with scales along the tokens (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2).

Shape suffixes: T tokens, K inputs, N outputs of this rank.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.config.units import MIB
from shardwright.precision.float8 import E4M3, TILE, Granularity, Quantised, cast, quantise
from shardwright.precision.float8_product import dequantise, product

_BLOCK_BYTES = 32 * MIB  # of a block of a float32 gradient, before it is added to the sum


def gradient_blocks(dy_TN: Quantised, x_TK: Quantised) -> Iterator[tuple[slice, Tensor]]:
    """dy^T x in blocks of rows: yields each block's rows and values, summed and returned in float32."""
    dy_NT, x_KT = along_columns(dy_TN), along_columns(x_TK)
    step = rows_of_block(x_TK.values.shape[1])
    for first in range(0, dy_TN.values.shape[1], step):
        rows = slice(first, first + step)
        scales = dy_NT.scales if dy_NT.granularity == "tensor" else dy_NT.scales[rows]
        yield rows, product(Quantised(dy_NT.values[rows], scales, dy_NT.granularity), x_KT, torch.float32)


def along_columns(matrix: Quantised) -> Quantised:
    """The transpose [C, R] of a matrix [R, C], with scales along the transpose's own rows. R is padded with zeros to a
    whole number of tiles, as devices require for the contracted dim of a product."""
    values = matrix.values
    missing = 0 if values.device.type == "cpu" else -values.shape[0] % TILE
    if matrix.granularity == "tensor":
        bytes_CR = functional.pad(values.view(torch.uint8).t(), (0, missing)).contiguous()
        return Quantised(bytes_CR.view(values.dtype), matrix.scales, "tensor")
    x_CR = functional.pad(dequantise(matrix, torch.bfloat16).t(), (0, missing)).contiguous()
    return quantise(x_CR, matrix.granularity, values.dtype)


def cast_as_before(x_TK: Tensor, granularity: Granularity, scale: Tensor | None) -> Quantised:
    """An input cast as in the forward; `scale` is the scale of that cast if it was one for the tensor."""
    return quantise(x_TK, granularity, E4M3) if scale is None else cast(x_TK, granularity, E4M3, scale)


def tensor_scale(matrix: Quantised | None) -> Tensor | None:
    """The scale of a matrix, or of each group of its rows, if it serves both directions; else None."""
    return matrix.scales if matrix is not None and matrix.granularity == "tensor" else None


def rows_of_block(num_inputs: int) -> int:
    """The number of rows of a block of a weight's gradient."""
    return max(TILE, _BLOCK_BYTES // (4 * num_inputs) // TILE * TILE)
