"""The MLP's activation, and its product with the gate (Shazeer 2020, arXiv 2002.05202), keeping little.

Autograd would keep act(gate) for the product, besides gate and up. It costs one pass over memory to compute again, and
the backward reads gate anyway: so only the fused product [gate | up] is kept. On CUDA each way is one kernel.

Shape suffixes: S sequence, B batch, F inner width of this rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.model.fused_operator import fused_operator

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
        y_SBF = fused_SBF2.new_empty(*fused_SBF2.shape[:-1], fused_SBF2.shape[-1] // 2)
        _gate(fused_SBF2, name, y_SBF)
        return y_SBF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy_SBF,) = grads
        (fused_SBF2,) = ctx.saved_tensors
        gradient_SBF2 = torch.empty_like(fused_SBF2)
        _gate_backward(dy_SBF, fused_SBF2, ctx.name, gradient_SBF2)
        return gradient_SBF2, None


def _gate_in_turn(fused_SBF2: Tensor, name: ActivationName, y_SBF: Tensor) -> None:
    gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
    if name == "silu":
        torch.ops.aten.silu.out(gate_SBF, out=y_SBF)
    else:
        torch.ops.aten.gelu.out(gate_SBF, approximate=_approximation(name), out=y_SBF)
    y_SBF.mul_(up_SBF)


def _gate_at_once(fused_SBF2: Tensor, name: ActivationName, y_SBF: Tensor) -> None:
    gate_SBF, up_SBF = fused_SBF2.float().chunk(2, dim=-1)
    y_SBF.copy_(activate(gate_SBF, name) * up_SBF)


def _gate_backward_in_turn(dy_SBF: Tensor, fused_SBF2: Tensor, name: ActivationName, gradient_SBF2: Tensor) -> None:
    gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
    dgate_SBF, dup_SBF = gradient_SBF2.chunk(2, dim=-1)
    torch.mul(dy_SBF, activate(gate_SBF, name), out=dup_SBF)
    dactivated_SBF = dy_SBF * up_SBF
    if name == "silu":
        torch.ops.aten.silu_backward.grad_input(dactivated_SBF, gate_SBF, grad_input=dgate_SBF)
    else:
        torch.ops.aten.gelu_backward.grad_input(
            dactivated_SBF, gate_SBF, approximate=_approximation(name), grad_input=dgate_SBF
        )


def _gate_backward_at_once(dy_SBF: Tensor, fused_SBF2: Tensor, name: ActivationName, gradient_SBF2: Tensor) -> None:
    gate_SBF, up_SBF = fused_SBF2.float().chunk(2, dim=-1)
    dy = dy_SBF.float()
    if name == "silu":
        dgate_SBF = torch.ops.aten.silu_backward(dy * up_SBF, gate_SBF)
    else:
        dgate_SBF = torch.ops.aten.gelu_backward(dy * up_SBF, gate_SBF, approximate=_approximation(name))
    gradient_SBF2.copy_(torch.cat((dgate_SBF, dy * activate(gate_SBF, name)), dim=-1))


_gate = fused_operator("gate(Tensor fused, str name, Tensor(a!) y) -> ()", _gate_in_turn, _gate_at_once)
_gate_backward = fused_operator(
    "gate_backward(Tensor dy, Tensor fused, str name, Tensor(a!) gradient) -> ()",
    _gate_backward_in_turn,
    _gate_backward_at_once,
)


def _approximation(name: ActivationName) -> str:
    return "tanh" if name == "gelu-tanh" else "none"
