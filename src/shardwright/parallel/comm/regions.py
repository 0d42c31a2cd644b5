"""Entering and leaving the regions of a model that an axis cuts: collectives with a gradient.

What the forward of one does, the backward of its conjugate does. Names f, g and their sequence-parallel forms are those
of Shoeybi et al. 2019 (arXiv 1909.08053, figure 3) and Korthikanti et al. 2022 (arXiv 2205.05198, figure 5).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_gather, all_reduce, reduce_scatter

Move = Callable[[Tensor, Axis], Tensor]  # along an axis, of a tensor that stays as it is


class _Conjugate(torch.autograd.Function):
    """Forward: `there`. Backward: `back`. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.axis), None, None, None


def conjugate(x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
    """`there` of x, whose gradient goes `back`."""
    return _Conjugate.apply(x, axis, there, back)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """f: enter a region where each rank of the axis computes a part of what becomes of all of `x`. Forward moves
    nothing; backward all-reduces the gradient."""
    return x if axis.size == 1 else conjugate(x, axis, _stay, _sum)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """f of sequence parallel: enter such a region from a tensor that is sharded over dim 0. Forward all-gathers dim 0;
    backward reduce-scatters the gradient."""
    return x if axis.size == 1 else conjugate(x, axis, all_gather, reduce_scatter)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g: leave a region where each rank of the axis computed a part: the parts are summed.

    Forward all-reduces; backward moves nothing. f, its conjugate, is also in the column-parallel product.
    """
    return x if axis.size == 1 else conjugate(x, axis, _sum, _stay)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """g of sequence parallel: leave such a region into a tensor that is sharded over dim 0. Forward reduce-scatters dim
    0; backward all-gathers the gradient."""
    return x if axis.size == 1 else conjugate(x, axis, reduce_scatter, all_gather)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.clone(), axis)


def _stay(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)
