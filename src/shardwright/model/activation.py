"""The MLP's activation, and its product with the gate (Shazeer 2020, arXiv 2002.05202), keeping little.

Autograd would keep act(gate) for the product, besides gate and up. It costs one pass over memory to compute again, and
the backward reads gate anyway: so only the fused product [gate | up] is kept. On CUDA each way is one kernel.

Most activations are functions of one number. That of gpt-oss (arXiv 2508.10925, section 2) takes gate and up: both are
clamped, and one is added to up; it is always gated.

Shape suffixes: S sequence, B batch, F inner width of this rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.precision.fused_operator import fused_operator

ActivationName = Literal["silu", "gelu", "gelu-tanh", "relu", "relu2", "quick-gelu", "clamped-silu", "identity"]
_STEEPNESS = 1.702  # of the sigmoid that is like GELU's error function (Hendrycks and Gimpel, arXiv 1606.08415)
_MOST = 7.0  # of what the clamped activation takes


def activate(x: Tensor, name: ActivationName) -> Tensor:
    """The activation alone, in the numbers of x."""
    match name:
        case "identity":
            return x
        case "silu":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "quick-gelu":
            return x * torch.sigmoid(_STEEPNESS * x)
        case "clamped-silu":
            return activate(x.clamp(max=_MOST), "quick-gelu")
        case _:
            return functional.gelu(x, approximate=_approximation(name))


def activate_and_keep(x: Tensor, name: ActivationName) -> Tensor:
    """The activation alone. Its autograd keeps x and nothing else; of relu it keeps what that gives in place of x."""
    return activate(x, name) if name in ("silu", "gelu", "gelu-tanh", "relu") else _Activation.apply(x, name)


def activate_gated(fused_SBF2: Tensor, name: ActivationName) -> Tensor:
    """act(gate) x up, [S, B, F], of [gate | up], [S, B, 2 F]."""
    return _GatedActivation.apply(fused_SBF2, name)


class _Activation(torch.autograd.Function):
    """An activation that torch has no kernel of. Keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        y = torch.empty_like(x)
        _activate(x, name, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _activate_backward(grads[0], x, ctx.name, dx)
        return dx, None


class _GatedActivation(torch.autograd.Function):
    """Forward: act(gate) x up; keeps [gate | up]. Backward: computes act(gate) again for up's gradient, and writes
    both gradients into one tensor, as the product before it needs them."""

    @staticmethod
    def forward(ctx: Any, fused_SBF2: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(fused_SBF2)
        ctx.name = name
        y_SBF = fused_SBF2.new_empty(*fused_SBF2.shape[:-1], fused_SBF2.shape[-1] // 2)
        _gate(fused_SBF2.flatten(0, -2), name, y_SBF.view(-1, y_SBF.shape[-1]))
        return y_SBF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy_SBF,) = grads
        (fused_SBF2,) = ctx.saved_tensors
        gradient_SBF2 = fused_SBF2.new_empty(fused_SBF2.shape)
        _gate_backward(dy_SBF.flatten(0, -2), fused_SBF2.flatten(0, -2), ctx.name, *halves(gradient_SBF2))
        return gradient_SBF2, None


def halves(gradient_SBF2: Tensor) -> tuple[Tensor, Tensor]:
    """Where the gradients of gate and up lie, as rows [N, F]. Apart, a kernel has both from one reading; in one tensor
    it would compute each element of either half by itself."""
    dgate_NF, dup_NF = gradient_SBF2.view(-1, gradient_SBF2.shape[-1]).chunk(2, dim=-1)
    return dgate_NF, dup_NF


def gate_in_turn(fused_NF2: Tensor, name: ActivationName, y_NF: Tensor) -> None:
    """Put act(gate) x up into `y_NF`, with the kernels that torch has."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    activate_in_turn(gate_NF, name, y_NF)
    y_NF.mul_(_factor(up_NF, name))


def activate_in_turn(x: Tensor, name: ActivationName, y: Tensor) -> None:
    """Put the activation into `y`, with the kernels that torch has."""
    match name:
        case "identity":
            y.copy_(x)
        case "silu":
            torch.ops.aten.silu.out(x, out=y)
        case "gelu" | "gelu-tanh":
            torch.ops.aten.gelu.out(x, approximate=_approximation(name), out=y)
        case "relu":
            torch.clamp(x, min=0, out=y)
        case "relu2":
            torch.clamp(x, min=0, out=y).square_()
        case "quick-gelu":
            torch.mul(x, _STEEPNESS, out=y).sigmoid_().mul_(x)
        case "clamped-silu":
            activate_in_turn(x.clamp(max=_MOST), "quick-gelu", y)


def gate_backward_in_turn(
    dy_NF: Tensor, fused_NF2: Tensor, name: ActivationName, dgate_NF: Tensor, dup_NF: Tensor
) -> None:
    """Put the gradients of gate and up where they belong, with the kernels that torch has."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    torch.mul(dy_NF, activate(gate_NF, name), out=dup_NF)
    if name == "clamped-silu":
        dup_NF.mul_(_passes(up_NF))
    activate_backward_in_turn(dy_NF * _factor(up_NF, name), gate_NF, name, dgate_NF)


def activate_backward_in_turn(dy: Tensor, x: Tensor, name: ActivationName, dx: Tensor) -> None:
    """Put the gradient of the activation's input into `dx`, with the kernels that torch has."""
    match name:
        case "silu":
            torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=dx)
        case "gelu" | "gelu-tanh":
            torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=_approximation(name), grad_input=dx)
        case _:
            dx.copy_(exact_activate_backward(dy, x, name))


# In float32, for the compiler: what is rounded is the result alone.


def exact_gate(fused_NF2: Tensor, name: ActivationName) -> Tensor:
    """act(gate) x up, in the numbers of `fused_NF2`."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    return activate(gate_NF, name) * _factor(up_NF, name)


def exact_gate_backward(dy_NF: Tensor, fused_NF2: Tensor, name: ActivationName) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, in the numbers of both."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    dgate_NF = exact_activate_backward(dy_NF * _factor(up_NF, name), gate_NF, name)
    dup_NF = dy_NF * activate(gate_NF, name)
    return dgate_NF, dup_NF * _passes(up_NF) if name == "clamped-silu" else dup_NF


def exact_activate_backward(dy: Tensor, x: Tensor, name: ActivationName) -> Tensor:
    """The gradient of the activation's input, in the numbers of both."""
    match name:
        case "identity":
            return dy
        case "silu":
            return torch.ops.aten.silu_backward(dy, x)
        case "relu":
            return dy * (x > 0)
        case "relu2":
            return dy * (2 * functional.relu(x))
        case "quick-gelu":
            share = torch.sigmoid(_STEEPNESS * x)
            return dy * share * (1 + _STEEPNESS * x * (1 - share))
        case "clamped-silu":
            return exact_activate_backward(dy * (x <= _MOST), x.clamp(max=_MOST), "quick-gelu")
        case _:
            return torch.ops.aten.gelu_backward(dy, x, approximate=_approximation(name))


def _factor(up: Tensor, name: ActivationName) -> Tensor:
    """The factor of the gate's activation: up, or for the clamped activation clamp(up) + 1."""
    return up.clamp(-_MOST, _MOST) + 1 if name == "clamped-silu" else up


def _passes(up: Tensor) -> Tensor:
    """Where clamp(up) is up."""
    return up.abs() <= _MOST


def _gate_at_once(fused_NF2: Tensor, name: ActivationName, y_NF: Tensor) -> None:
    y_NF.copy_(exact_gate(fused_NF2.float(), name))


def _gate_backward_at_once(
    dy_NF: Tensor, fused_NF2: Tensor, name: ActivationName, dgate_NF: Tensor, dup_NF: Tensor
) -> None:
    dgate, dup = exact_gate_backward(dy_NF.float(), fused_NF2.float(), name)
    dgate_NF.copy_(dgate)
    dup_NF.copy_(dup)


def _activate_at_once(x: Tensor, name: ActivationName, y: Tensor) -> None:
    y.copy_(activate(x.float(), name))


def _activate_backward_at_once(dy: Tensor, x: Tensor, name: ActivationName, dx: Tensor) -> None:
    dx.copy_(exact_activate_backward(dy.float(), x.float(), name))


_gate = fused_operator("gate(Tensor fused, str name, Tensor(a!) y) -> ()", gate_in_turn, _gate_at_once)
_gate_backward = fused_operator(
    "gate_backward(Tensor dy, Tensor fused, str name, Tensor(a!) dgate, Tensor(b!) dup) -> ()",
    gate_backward_in_turn,
    _gate_backward_at_once,
)
_activate = fused_operator("activate(Tensor x, str name, Tensor(a!) y) -> ()", activate_in_turn, _activate_at_once)
_activate_backward = fused_operator(
    "activate_backward(Tensor dy, Tensor x, str name, Tensor(a!) dx) -> ()",
    activate_backward_in_turn,
    _activate_backward_at_once,
)


def _approximation(name: ActivationName) -> str:
    return "tanh" if name == "gelu-tanh" else "none"
