"""Products of many experts: each has some of the rows, and a matrix of its own. Gale et al. 2022 (arXiv 2211.15841).

Rows are sorted by expert, so that each expert's rows are neighbours, and no row is padding. The gradient of an expert
without rows is 0.

Shape suffixes: N rows of all experts, e experts of this rank, H input width, O output width (in a weight, all dims
between the experts' and the last), A and B either of the two.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.tensor.product_input import (
    InputRecipe,
    ProductInput,
    keep_input,
    keep_input_or_cast,
    keep_recipe,
    kept_cast,
    kept_input,
    make_again,
    values_and_recipe,
)
from shardwright.precision.float8_experts import CastRows, Float8Experts, cast_rows_as_before

_KERNEL_ALIGNMENT_BYTES = 16  # alignment of a row that the kernel requires


def grouped_linear(
    x_NH: ProductInput, weight: PlacedParameter, counts_e: Tensor, deferred: DeferredGradients, kind: str = "cpu"
) -> Tensor:
    """x W^T for each row, with the matrix of the row's expert: [N, H] to [N, O], for a weight of shape [e, ..., H].

    `counts_e` are the numbers of rows of the experts, int64 in host memory. The weight's gradient may wait in
    `deferred`. `kind` is the kind of device whose kernels are used.
    """
    return _GroupedProduct.apply(*values_and_recipe(x_NH), weight, counts_e, deferred, kind)


def grouped_product(x_NA: Tensor, matrices_eAB: Tensor, counts_e: Tensor, kind: str) -> Tensor:
    """Each row times the matrix of its expert: [N, B]. Not differentiable.

    On CUDA one kernel computes all products. On a CPU that kernel is a loop over the experts too, and no faster than
    the loop here (benchmarks/grouped.py). If no expert has rows, nothing is multiplied.
    """
    if kind == "cuda" and len(x_NA) and x_NA.dtype == torch.bfloat16 and _is_aligned(matrices_eAB):
        ends_e = counts_e.cumsum(0).to(x_NA.device, torch.int32, non_blocking=True)
        return functional.grouped_mm(x_NA, matrices_eAB, offs=ends_e)
    y_NB = x_NA.new_empty(x_NA.shape[0], matrices_eAB.shape[2])
    for expert, rows in row_ranges(counts_e):
        torch.mm(x_NA[rows], matrices_eAB[expert], out=y_NB[rows])
    return y_NB


def row_ranges(counts_e: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, with their rows."""
    starts = (counts_e.cumsum(0) - counts_e).tolist()
    return [(e, slice(starts[e], starts[e] + num_rows)) for e, num_rows in enumerate(counts_e.tolist()) if num_rows]


def _is_aligned(matrices_eAB: Tensor) -> bool:
    _, a, b = matrices_eAB.shape
    return all(size * matrices_eAB.element_size() % _KERNEL_ALIGNMENT_BYTES == 0 for size in (a, b))


def _matrices(weight: PlacedParameter, dtype: torch.dtype) -> Tensor:
    """The matrices of frozen experts, [e, O, H]: views, or numbers made of rows in NF4."""
    rows = weight.matrix(dtype)
    return rows.view(len(weight), -1, rows.shape[-1])


def _states(weight: PlacedParameter) -> Float8Experts:
    assert isinstance(weight.float8, Float8Experts), f"{weight.place.name} is of several experts"
    return weight.float8


class _GroupedProduct(torch.autograd.Function):
    """The product of `grouped_linear`. Moves nothing. Keeps x, or its recipe, unless the weight is frozen; the weight's
    gradient is added directly to its sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        recipe: InputRecipe | None,
        weight: PlacedParameter,
        counts_e: Tensor,
        deferred: DeferredGradients,
        kind: str,
    ) -> Tensor:
        # Not a saved tensor: the weight may be released after the forward, and gathered again into other memory.
        ctx.weight, ctx.counts_e, ctx.deferred, ctx.kind = weight, counts_e, deferred, kind
        if weight.place.is_frozen:
            keep_recipe(ctx, recipe)
            return grouped_product(x_NH, _matrices(weight, x_NH.dtype).transpose(1, 2), counts_e, kind)
        if weight.float8 is None:
            ctx.granularity = None
            keep_input(ctx, x_NH, recipe)
            return grouped_product(x_NH, weight.flatten(1, -2).transpose(1, 2), counts_e, kind)
        states = _states(weight)
        y_NO, cast = states.forward_product(x_NH, weight.flatten(1, -2), row_ranges(counts_e))
        keep_input_or_cast(ctx, x_NH, recipe, cast.matrix if states.weight_gradients else None, owns_input=True)
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dy_NO = grads[0].contiguous()
        weight: PlacedParameter = ctx.weight
        counts_e: Tensor = ctx.counts_e
        kind: str = ctx.kind
        if weight.place.is_frozen:
            make_again(ctx)
            dx_NH = grouped_product(dy_NO, _matrices(weight, dy_NO.dtype), counts_e, kind)
            return dx_NH, None, None, None, None, None
        if ctx.granularity is not None:
            return _in_float8(ctx, dy_NO, weight, counts_e), None, None, None, None, None
        x_NH = kept_input(ctx)
        if weight.float8 is None:
            dx_NH = grouped_product(dy_NO, weight.flatten(1, -2), counts_e, kind)
        else:
            dx_NH, _ = _states(weight).input_gradient(dy_NO, weight.flatten(1, -2), row_ranges(counts_e))
        ctx.deferred.now_or_later(lambda: weight.add_products(dy_NO, x_NH, row_ranges(counts_e), kind))
        return dx_NH, None, None, None, None, None


def _in_float8(ctx: Any, dy_NO: Tensor, weight: PlacedParameter, counts_e: Tensor) -> Tensor:
    """The backward if weight gradients are computed in fp8 too: their deferred operands are in fp8."""
    ranges = row_ranges(counts_e)
    if ctx.keeps_cast:
        x = CastRows(kept_cast(ctx))
    else:
        x = cast_rows_as_before(kept_input(ctx), ctx.granularity, ranges, ctx.scale)
    dx_NH, dy = _states(weight).input_gradient(dy_NO, weight.flatten(1, -2), ranges)
    ctx.deferred.now_or_later(lambda: weight.add_float8_products(dy, x, ranges))
    return dx_NH


def count_each(experts: Tensor, num_experts: int) -> Tensor:
    """The number of times that each of `num_experts` experts occurs in a tensor of any shape, [E], int64. The number E
    means no expert.

    torch.bincount is not used, since on CUDA the host waits for the size of its result.
    """
    numbers = experts.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:num_experts]
