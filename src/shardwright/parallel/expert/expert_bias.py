"""Biases of experts: adds to each row the bias of its expert, times the weight of the row's choice if there is one.

Rows are sorted by expert. The weighted bias completes weight x (W y + b) if the input of the product has already been
multiplied by the weight. Forward and backward are one kernel each on CUDA, besides one sum over the rows of each
expert.

Shape suffixes: N rows of all experts, e experts of this rank, O output width.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.expert.grouped_linear import row_ranges
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.precision.fused_operator import fused_operator


def add_expert_bias(
    y_NO: Tensor, bias: PlacedParameter, counts_e: Tensor, weight_N1: Tensor | None = None, adds: bool = True
) -> Tensor:
    """Add to `y_NO`, in place, the bias of each row's expert, of shape [e, ...]. `counts_e` are the numbers of rows of
    the experts, in host memory. If each rank has a part of y, only one of them `adds` the bias; all compute its
    gradient."""
    return _AddExpertBias.apply(y_NO, weight_N1, bias, counts_e, adds)


class _AddExpertBias(torch.autograd.Function):
    """Forward: adds in place. Backward: a bias's gradient is the sum over its rows; a weight's gradient is the product
    of gradient and bias. Keeps the weights."""

    @staticmethod
    def forward(
        ctx: Any, y_NO: Tensor, weight_N1: Tensor | None, bias: PlacedParameter, counts_e: Tensor, adds: bool
    ) -> Tensor:
        ctx.mark_dirty(y_NO)
        ctx.save_for_backward(weight_N1)
        # Not a saved tensor: the bias may be released after the forward, and gathered again into other memory.
        ctx.bias, ctx.counts_e, ctx.adds = bias, counts_e, adds
        if adds:
            _add(y_NO, bias.flatten(1), _experts_of_rows(counts_e, y_NO), weight_N1)
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (dy_NO,) = grads
        (weight_N1,) = ctx.saved_tensors
        bias: PlacedParameter = ctx.bias
        counts_e: Tensor = ctx.counts_e
        sums_eO = torch.zeros(len(counts_e), dy_NO.shape[1], device=dy_NO.device)
        for expert, rows in row_ranges(counts_e):
            dy = dy_NO[rows] if weight_N1 is None else dy_NO[rows] * weight_N1[rows]
            torch.sum(dy, 0, dtype=torch.float32, out=sums_eO[expert])
        bias.add_gradient(sums_eO)
        if weight_N1 is None:
            return dy_NO, None, None, None, None
        dweight_N1 = torch.zeros_like(weight_N1)
        if ctx.adds:
            _weight_gradients(dy_NO, bias.flatten(1), _experts_of_rows(counts_e, dy_NO), dweight_N1)
        return dy_NO, dweight_N1, None, None, None


def _experts_of_rows(counts_e: Tensor, rows: Tensor) -> Tensor:
    """The expert of each row, [N], int64."""
    experts_e = torch.arange(len(counts_e), device=rows.device)
    counts = counts_e.to(rows.device, non_blocking=True)
    return experts_e.repeat_interleave(counts, output_size=len(rows))


def _add_in_turn(y_NO: Tensor, bias_eO: Tensor, expert_N: Tensor, weight_N1: Tensor | None) -> None:
    bias_NO = bias_eO.index_select(0, expert_N)
    y_NO.add_(bias_NO if weight_N1 is None else bias_NO * weight_N1)


def _add_at_once(y_NO: Tensor, bias_eO: Tensor, expert_N: Tensor, weight_N1: Tensor | None) -> None:
    bias_NO = bias_eO[expert_N].float()
    y_NO.copy_(y_NO.float() + (bias_NO if weight_N1 is None else bias_NO * weight_N1))


def _weight_gradients_in_turn(dy_NO: Tensor, bias_eO: Tensor, expert_N: Tensor, dweight_N1: Tensor) -> None:
    torch.sum(dy_NO.float() * bias_eO.index_select(0, expert_N), 1, keepdim=True, out=dweight_N1)


def _weight_gradients_at_once(dy_NO: Tensor, bias_eO: Tensor, expert_N: Tensor, dweight_N1: Tensor) -> None:
    dweight_N1.copy_((dy_NO.float() * bias_eO[expert_N].float()).sum(1, keepdim=True))


_add = fused_operator(
    "add_expert_bias(Tensor(a!) y, Tensor bias, Tensor experts, Tensor? weight) -> ()", _add_in_turn, _add_at_once
)
_weight_gradients = fused_operator(
    "expert_bias_of_weights(Tensor dy, Tensor bias, Tensor experts, Tensor(a!) dweight) -> ()",
    _weight_gradients_in_turn,
    _weight_gradients_at_once,
)
