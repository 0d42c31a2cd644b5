"""The activation inside an expert, times the weight of the token's choice of this expert.

The weight could multiply the result of the expert, but then that result would be kept for the weight's gradient: a row
of hidden width for each choice. Here the weight's gradient is the sum over a row of activation x its gradient. The
backward recomputes the activation from the input, which is kept anyway. On CUDA forward and backward are one kernel
each.

Shape suffixes: N rows of tokens at the experts of this rank, F inner width of an expert on this rank, U width of the
input: F, or 2 F for gate and up, H hidden.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.model.activation import (
    ActivationName,
    activate,
    activate_backward_in_turn,
    activate_in_turn,
    exact_activate_backward,
    exact_gate,
    exact_gate_backward,
    gate_backward_in_turn,
    gate_in_turn,
    halves,
)
from shardwright.precision.fused_operator import fused_operator


def weighed_activation(up_NU: Tensor, weight_N1: Tensor, name: ActivationName, gated: bool) -> Tensor:
    """weight x act(up), or for [gate | up] if `gated` weight x act(gate) x up, [N, F] in the dtype of `up_NU`. The
    weights and the product with them are float32 until the result is rounded."""
    return _WeighedActivation.apply(up_NU, weight_N1, name, gated)


def weighed_rows(x_NH: Tensor, weight_N1: Tensor) -> Tensor:
    """weight x x, [N, H] in the dtype of x, for experts whose input takes the weights. Keeps x."""
    return _WeighedActivation.apply(x_NH, weight_N1, "identity", False)


class _WeighedActivation(torch.autograd.Function):
    """Forward: the activation times the weight; keeps both inputs. Backward: recomputes the activation, for the
    gradients of the weight and of the activation's input."""

    @staticmethod
    def forward(ctx: Any, up_NU: Tensor, weight_N1: Tensor, name: ActivationName, gated: bool) -> Tensor:
        ctx.save_for_backward(up_NU, weight_N1)
        ctx.name, ctx.gated = name, gated
        y_NF = up_NU.new_empty(len(up_NU), up_NU.shape[1] // (2 if gated else 1))
        _weigh(up_NU, weight_N1, name, gated, y_NF)
        return y_NF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        up_NU, weight_N1 = ctx.saved_tensors
        dup_NU, dweight_N1 = up_NU.new_empty(up_NU.shape), torch.empty_like(weight_N1)
        if ctx.gated:
            _weigh_gated_backward(grads[0], up_NU, weight_N1, ctx.name, dweight_N1, *halves(dup_NU))
        else:
            _weigh_backward(grads[0], up_NU, weight_N1, ctx.name, dweight_N1, dup_NU)
        return dup_NU, dweight_N1, None, None


def _weigh_in_turn(up_NU: Tensor, weight_N1: Tensor, name: ActivationName, gated: bool, y_NF: Tensor) -> None:
    (gate_in_turn if gated else activate_in_turn)(up_NU, name, y_NF)
    y_NF.mul_(weight_N1)


def _weigh_at_once(up_NU: Tensor, weight_N1: Tensor, name: ActivationName, gated: bool, y_NF: Tensor) -> None:
    y_NF.copy_((exact_gate if gated else activate)(up_NU.float(), name) * weight_N1)


def _weigh_backward_in_turn(
    dy_NF: Tensor, up_NF: Tensor, weight_N1: Tensor, name: ActivationName, dweight_N1: Tensor, dup_NF: Tensor
) -> None:
    activated_NF = torch.empty_like(dy_NF)
    activate_in_turn(up_NF, name, activated_NF)
    dactivated_NF = _weight_gradients_in_turn(dy_NF, weight_N1, activated_NF, dweight_N1)
    activate_backward_in_turn(dactivated_NF, up_NF, name, dup_NF)


def _weigh_gated_backward_in_turn(
    dy_NF: Tensor,
    up_NU: Tensor,
    weight_N1: Tensor,
    name: ActivationName,
    dweight_N1: Tensor,
    dgate_NF: Tensor,
    dup_NF: Tensor,
) -> None:
    activated_NF = torch.empty_like(dy_NF)
    gate_in_turn(up_NU, name, activated_NF)
    dactivated_NF = _weight_gradients_in_turn(dy_NF, weight_N1, activated_NF, dweight_N1)
    gate_backward_in_turn(dactivated_NF, up_NU, name, dgate_NF, dup_NF)


def _weight_gradients_in_turn(dy_NF: Tensor, weight_N1: Tensor, activated_NF: Tensor, dweight_N1: Tensor) -> Tensor:
    """Put the gradients of the weights into `dweight_N1`. Returns the activation's gradient, in the memory of
    `activated_NF`."""
    torch.sum(dy_NF.to(torch.float32, copy=True).mul_(activated_NF), 1, keepdim=True, out=dweight_N1)
    return torch.mul(dy_NF, weight_N1, out=activated_NF)


def _weigh_backward_at_once(
    dy_NF: Tensor, up_NF: Tensor, weight_N1: Tensor, name: ActivationName, dweight_N1: Tensor, dup_NF: Tensor
) -> None:
    dy, up = dy_NF.float(), up_NF.float()
    dweight_N1.copy_((activate(up, name) * dy).sum(1, keepdim=True))
    dup_NF.copy_(exact_activate_backward(dy * weight_N1, up, name))


def _weigh_gated_backward_at_once(
    dy_NF: Tensor,
    up_NU: Tensor,
    weight_N1: Tensor,
    name: ActivationName,
    dweight_N1: Tensor,
    dgate_NF: Tensor,
    dup_NF: Tensor,
) -> None:
    dy, up = dy_NF.float(), up_NU.float()
    dweight_N1.copy_((exact_gate(up, name) * dy).sum(1, keepdim=True))
    dgate, dup = exact_gate_backward(dy * weight_N1, up, name)
    dgate_NF.copy_(dgate)
    dup_NF.copy_(dup)


_weigh = fused_operator(
    "weigh(Tensor up, Tensor weight, str name, bool gated, Tensor(a!) y) -> ()", _weigh_in_turn, _weigh_at_once
)
_weigh_backward = fused_operator(
    "weigh_backward(Tensor dy, Tensor up, Tensor weight, str name, Tensor(a!) dweight, Tensor(b!) dup) -> ()",
    _weigh_backward_in_turn,
    _weigh_backward_at_once,
)
_weigh_gated_backward = fused_operator(
    "weigh_gated_backward(Tensor dy, Tensor up, Tensor weight, str name, Tensor(a!) dweight, Tensor(b!) dgate, "
    "Tensor(c!) dup) -> ()",
    _weigh_gated_backward_in_turn,
    _weigh_gated_backward_at_once,
)
