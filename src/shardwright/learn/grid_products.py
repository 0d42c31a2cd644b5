"""Bytes that a rank sends for the products of a layer if matrices are cut along one, two, two and a half or three dims.

Letters: T tokens, k and n the inner width and the columns of a product, q the side of a grid, d its depth, p all ranks.
Along one dim it is Megatron-LM's pairs. On a grid of d x q x q ranks (d is 1 in two dims: Xu et al. 2021, arXiv
2104.05343; else Wang et al. 2021, arXiv 2105.14500) the tokens are cut by d q, k and n by q: a row of ranks gathers
the input, a column the weight, and in the backward both are gathered again and both gradients are summed. In a cube of
q x q x q (Bian et al. 2021, arXiv 2105.14450) a line of ranks gathers each operand, and one sums the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.config.matrix import Matrix
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import ring_sent

_TYPE_BYTES = 2  # 16 bits


@dataclass(frozen=True)
class GridBytes:
    """Bytes that a rank sends for a layer, forward and backward, with those of weights and of their gradients apart."""

    activations: float
    weights: float


def line_bytes(matrices: Sequence[Matrix], tokens: int, ranks: int) -> GridBytes:
    """Bytes along one dim: two all-reduces for each pair of products, one in the forward and one in the backward."""
    widths = [matrix.columns for matrix in matrices if matrix.is_row_parallel]
    return GridBytes(sum(2 * _sent(ranks, tokens * width, rounds=2) for width in widths), 0.0)


def grid_bytes(matrices: Sequence[Matrix], tokens: int, depth: int, side: int) -> GridBytes:
    """Bytes on a grid of depth x side x side ranks: each operand is gathered twice, and its gradient scattered. Ranks
    at one place of `depth` grids hold the same weights, and sum their gradients."""
    activations = weights = 0.0
    for matrix in matrices:
        activations += 3 * _sent(side, tokens * matrix.inner / (depth * side))
        weights += 3 * _sent(side, matrix.num_elements / side)
        weights += _sent(depth, matrix.num_elements / side**2, rounds=2)
    return GridBytes(activations, weights)


def cube_bytes(matrices: Sequence[Matrix], tokens: int, side: int) -> GridBytes:
    """Bytes in a cube of side x side x side ranks: each operand is gathered twice, and its gradient scattered; the
    product is scattered, and its gradient gathered."""
    widths, face = [3 * matrix.inner + 2 * matrix.columns for matrix in matrices], side**2
    activations = sum(_sent(side, tokens * width / face) for width in widths)
    weights = sum(3 * _sent(side, matrix.num_elements / face) for matrix in matrices)
    return GridBytes(activations, weights)


def _sent(ranks: int, elements: float, rounds: int = 1) -> float:
    """Bytes that a rank sends while a tensor goes along a ring."""
    return ring_sent(Group(ranks, ranks), _TYPE_BYTES * elements, rounds).total
