"""The MLP's activation, and its product with the gate (Shazeer 2020, arXiv 2002.05202), keeping little.

Autograd would keep act(gate) for the product, besides gate and up. It costs one pass over memory to compute again, and
the backward reads gate anyway: so only the fused product [gate | up] is kept. On CUDA each way is one kernel.

Shape suffixes: S sequence, B batch, F inner width of this rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.precision.fused_operator import fused_operator

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


def gate_in_turn(fused_SBF2: Tensor, name: ActivationName, y_SBF: Tensor) -> None:
    """Put act(gate) x up into `y_SBF`, with the kernels that torch has."""
    gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
    activate_in_turn(gate_SBF, name, y_SBF)
    y_SBF.mul_(up_SBF)


def activate_in_turn(x: Tensor, name: ActivationName, y: Tensor) -> None:
    """Put the activation into `y`, with the kernel that torch has."""
    if name == "silu":
        torch.ops.aten.silu.out(x, out=y)
    else:
        torch.ops.aten.gelu.out(x, approximate=_approximation(name), out=y)


def gate_backward_in_turn(dy_SBF: Tensor, fused_SBF2: Tensor, name: ActivationName, gradient_SBF2: Tensor) -> None:
    """Put the gradient of [gate | up] into `gradient_SBF2`, with the kernels that torch has."""
    gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
    dgate_SBF, dup_SBF = gradient_SBF2.chunk(2, dim=-1)
    torch.mul(dy_SBF, activate(gate_SBF, name), out=dup_SBF)
    activate_backward_in_turn(dy_SBF * up_SBF, gate_SBF, name, dgate_SBF)


def activate_backward_in_turn(dy: Tensor, x: Tensor, name: ActivationName, dx: Tensor) -> None:
    """Put the gradient of the activation's input into `dx`, with the kernel that torch has."""
    if name == "silu":
        torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=dx)
    else:
        torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=_approximation(name), grad_input=dx)


# In float32, for the compiler: what is rounded is the result alone.


def exact_gate(fused_SBF2: Tensor, name: ActivationName) -> Tensor:
    """act(gate) x up, in the numbers of `fused_SBF2`."""
    gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
    return activate(gate_SBF, name) * up_SBF


def exact_gate_backward(dy_SBF: Tensor, fused_SBF2: Tensor, name: ActivationName) -> Tensor:
    """The gradient of [gate | up], in the numbers of both."""
    gate_SBF, up_SBF = fused_SBF2.chunk(2, dim=-1)
    dgate_SBF = exact_activate_backward(dy_SBF * up_SBF, gate_SBF, name)
    return torch.cat((dgate_SBF, dy_SBF * activate(gate_SBF, name)), dim=-1)


def exact_activate_backward(dy: Tensor, x: Tensor, name: ActivationName) -> Tensor:
    """The gradient of the activation's input, in the numbers of both."""
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    return torch.ops.aten.gelu_backward(dy, x, approximate=_approximation(name))


def _gate_at_once(fused_SBF2: Tensor, name: ActivationName, y_SBF: Tensor) -> None:
    y_SBF.copy_(exact_gate(fused_SBF2.float(), name))


def _gate_backward_at_once(dy_SBF: Tensor, fused_SBF2: Tensor, name: ActivationName, gradient_SBF2: Tensor) -> None:
    gradient_SBF2.copy_(exact_gate_backward(dy_SBF.float(), fused_SBF2.float(), name))


_gate = fused_operator("gate(Tensor fused, str name, Tensor(a!) y) -> ()", gate_in_turn, _gate_at_once)
_gate_backward = fused_operator(
    "gate_backward(Tensor dy, Tensor fused, str name, Tensor(a!) gradient) -> ()",
    gate_backward_in_turn,
    _gate_backward_at_once,
)


def _approximation(name: ActivationName) -> str:
    return "tanh" if name == "gelu-tanh" else "none"
