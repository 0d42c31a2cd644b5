"""The MLP's activation, and its product with the gate (Shazeer 2020, arXiv 2002.05202), keeping little.

Autograd would keep act(gate) for the product, besides gate and up. It costs one pass over memory to compute again, and
the backward reads gate anyway: so only the fused product [gate | up] is kept.

Shape suffixes: S sequence, B batch, F inner width of this rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

ActivationName = Literal["silu", "gelu", "gelu-tanh"]


def activate(x: Tensor, name: ActivationName) -> Tensor:
    """The activation alone. Its autograd keeps x and nothing else."""
    return functional.silu(x) if name == "silu" else functional.gelu(x, approximate=_approximation(name))


def activate_gated(fused_SBF2: Tensor, name: ActivationName) -> Tensor:
    """act(gate) x up, [S, B, F], of [gate | up], [S, B, 2 F]."""
    return _GatedActivation.apply(fused_SBF2, name)


class _GatedActivation(torch.autograd.Function):
    """Forward: act(gate) x up; keeps [gate | up]. Backward: computes act(gate) again for up's gradient, and writes
    both gradients into one tensor, as the product before it needs them."""

    @staticmethod
    def forward(ctx: Any, fused_SBF2: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(fused_SBF2)
        ctx.name = name
        gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
        return activate(gate_SBF, name).mul_(up_SBF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy_SBF,) = grads
        (fused_SBF2,) = ctx.saved_tensors
        gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
        gradient_SBF2 = torch.empty_like(fused_SBF2)
        dgate_SBF, dup_SBF = gradient_SBF2.chunk(2, dim=-1)
        torch.mul(dy_SBF, activate(gate_SBF, ctx.name), out=dup_SBF)
        dactivated_SBF = dy_SBF * up_SBF
        if ctx.name == "silu":
            torch.ops.aten.silu_backward.grad_input(dactivated_SBF, gate_SBF, grad_input=dgate_SBF)
        else:
            torch.ops.aten.gelu_backward.grad_input(
                dactivated_SBF, gate_SBF, approximate=_approximation(ctx.name), grad_input=dgate_SBF
            )
        return gradient_SBF2, None


def _approximation(name: ActivationName) -> str:
    return "tanh" if name == "gelu-tanh" else "none"
