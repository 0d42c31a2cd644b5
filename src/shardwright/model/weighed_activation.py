"""The activation inside an expert, times the weight that a token's choice of the expert has.

The weight could meet what the expert gives, but then that would be kept for the weight's gradient: a whole row of
hidden width for each choice. Here that gradient is the row's sum of activation x its gradient, and the activation is
computed again in the backward from what is kept for its own gradient anyway.

Shape suffixes: N rows of tokens at the experts of this rank, F inner width of an expert on this rank, U width of what
goes in: F, or 2 F of gate and up.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.model.activation import ActivationName, activate, activate_gated


def weighed_activation(up_NU: Tensor, weight_N1: Tensor, name: ActivationName, gated: bool) -> Tensor:
    """weight x act(up), or weight x act(gate) x up of [gate | up] if `gated`, [N, F] in the dtype of `up_NU`. The
    weights are float32, and so is the product with them until it is rounded."""
    return _WeighedActivation.apply(up_NU, weight_N1, name, gated)


def _activated(up_NU: Tensor, name: ActivationName, gated: bool) -> Tensor:
    return activate_gated(up_NU, name) if gated else activate(up_NU, name)


class _WeighedActivation(torch.autograd.Function):
    """Forward: the activation times the weight; keeps what goes in. Backward: computes the activation again, for the
    weight's gradient and with a graph for its own."""

    @staticmethod
    def forward(ctx: Any, up_NU: Tensor, weight_N1: Tensor, name: ActivationName, gated: bool) -> Tensor:
        ctx.save_for_backward(up_NU, weight_N1)
        ctx.name, ctx.gated = name, gated
        return _activated(up_NU, name, gated).mul_(weight_N1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy_NF,) = grads
        up_NU, weight_N1 = ctx.saved_tensors
        leaf_NU = up_NU.detach().requires_grad_()
        with torch.enable_grad():
            activated_NF = _activated(leaf_NU, ctx.name, ctx.gated)
        dweight_N1 = dy_NF.to(torch.float32, copy=True).mul_(activated_NF.detach()).sum(1, keepdim=True)
        dactivated_NF = torch.mul(dy_NF, weight_N1, out=torch.empty_like(dy_NF))
        (dup_NU,) = torch.autograd.grad(activated_NF, leaf_NU, dactivated_NF)
        return dup_NU, dweight_N1, None, None
