"""Collectives with a gradient: they enter and leave the regions of a model that are sharded over an axis.

The forward of a collective is the backward of its conjugate. The names f, g and their sequence-parallel forms are those
of Shoeybi et al. 2019 (arXiv 1909.08053, figure 3) and Korthikanti et al. 2022 (arXiv 2205.05198, figure 5).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_gather, all_reduce, reduce_scatter

Move = Callable[[Tensor, Axis], Tensor]  # a collective over an axis that does not change its operand


class _Conjugate(torch.autograd.Function):
    """Forward: `forward_move`. Backward: `backward_move`. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward_move: Move, backward_move: Move) -> Tensor:
        ctx.axis, ctx.backward_move = axis, backward_move
        return forward_move(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_move(grads[0], ctx.axis), None, None, None


def conjugate(x: Tensor, axis: Axis, forward_move: Move, backward_move: Move) -> Tensor:
    """`forward_move` of x, whose gradient is moved by `backward_move`."""
    return _Conjugate.apply(x, axis, forward_move, backward_move)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """f: enter a region in which each rank of the axis computes a part of the result from the whole `x`. Forward moves
    nothing; backward all-reduces the gradient."""
    return x if axis.size == 1 else conjugate(x, axis, _pass_through, _sum)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """f of sequence parallel: enter such a region from a tensor that is sharded over dim 0. Forward all-gathers dim 0;
    backward reduce-scatters the gradient."""
    return x if axis.size == 1 else conjugate(x, axis, all_gather, reduce_scatter)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g: leave a region in which each rank of the axis computed a part: the parts are summed.

    Forward all-reduces; backward moves nothing. f, its conjugate, is also in the column-parallel product.
    """
    return x if axis.size == 1 else conjugate(x, axis, _sum, _pass_through)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """g of sequence parallel: leave such a region into a tensor that is sharded over dim 0. Forward reduce-scatters dim
    0; backward all-gathers the gradient."""
    return x if axis.size == 1 else conjugate(x, axis, reduce_scatter, all_gather)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.clone(), axis)


def _pass_through(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)
