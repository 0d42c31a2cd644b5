"""Entering and leaving the regions of a model that tensor parallel cuts: collectives with a gradient.

Names f, g and their sequence-parallel forms are those of Shoeybi et al. 2019 (arXiv 1909.08053, figure 3) and
Korthikanti et al. 2022 (arXiv 2205.05198, figure 5). What the forward of one does, the backward of its conjugate does.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.collectives import Axis, all_gather, all_reduce, reduce_scatter


class _ReduceFrom(torch.autograd.Function):
    """g: forward all-reduces; backward moves nothing. Its conjugate f is below, and in the column-parallel product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ScatterTo(torch.autograd.Function):
    """g of sequence parallel: forward reduce-scatters dim 0; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis.for_backward), None


class _CopyTo(torch.autograd.Function):
    """f: forward moves nothing; backward all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.axis.for_backward), None


class _GatherFrom(torch.autograd.Function):
    """f of sequence parallel: forward all-gathers dim 0; backward reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.axis.for_backward), None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Enter a region where each rank of the axis computes a part of what becomes of all of `x`."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Enter such a region from a tensor that is sharded over dim 0."""
    return x if axis.size == 1 else _GatherFrom.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Leave a region where each rank of the axis computed a part: the parts are summed."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Leave such a region into a tensor that is sharded over dim 0."""
    return x if axis.size == 1 else _ScatterTo.apply(x, axis)
