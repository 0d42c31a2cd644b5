"""The MLP's activation and its product with the gate (Shazeer 2020, arXiv 2002.05202), with few kept tensors.

Autograd would keep act(gate) for the product, besides gate and up. To recompute it costs one pass over memory, and the
backward reads gate anyway, so only the fused product [gate | up] is kept. On CUDA forward and backward are one kernel
each.

Most activations are functions of one number. The activation of gpt-oss (arXiv 2508.10925, section 2) takes gate and up:
both are clamped, and 1 is added to up; it is always gated.

Shape suffixes: S sequence, B batch, F inner width of this rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.precision.fused_operator import fused_operator

ActivationName = Literal["silu", "gelu", "gelu-tanh", "relu", "relu2", "quick-gelu", "clamped-silu", "identity"]
_STEEPNESS = 1.702  # slope of the sigmoid that approximates GELU (Hendrycks and Gimpel, arXiv 1606.08415)
_LARGEST = 7.0  # bound of the inputs of the clamped activation


def activate(x: Tensor, name: ActivationName) -> Tensor:
    """The activation alone, in the dtype of x."""
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
            return activate(x.clamp(max=_LARGEST), "quick-gelu")
        case "gelu" | "gelu-tanh":
            return functional.gelu(x, approximate=_approximation(name))


def activate_and_keep(x: Tensor, name: ActivationName) -> Tensor:
    """The activation alone. Autograd keeps x and nothing else; for relu it keeps the result instead of x."""
    return activate(x, name) if name in ("silu", "gelu", "gelu-tanh", "relu") else _Activation.apply(x, name)


def activate_gated(fused_SBF2: Tensor, name: ActivationName) -> Tensor:
    """act(gate) x up, [S, B, F], of [gate | up], [S, B, 2 F]."""
    return _GatedActivation.apply(fused_SBF2, name)


class _Activation(torch.autograd.Function):
    """An activation for which torch has no kernel. Keeps x."""

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
    """Forward: act(gate) x up; keeps [gate | up]. Backward: recomputes act(gate) for up's gradient, and writes both
    gradients into one tensor, as the backward of the up product needs them."""

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
    """Views of the gradients of gate and up, each [N, F]. With two outputs a kernel computes both gradients from one
    read of its inputs; with one output it would compute each element of either half separately."""
    dgate_NF, dup_NF = gradient_SBF2.view(-1, gradient_SBF2.shape[-1]).chunk(2, dim=-1)
    return dgate_NF, dup_NF


def gate_in_turn(fused_NF2: Tensor, name: ActivationName, y_NF: Tensor) -> None:
    """Put act(gate) x up into `y_NF`, with torch's kernels."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    activate_in_turn(gate_NF, name, y_NF)
    y_NF.mul_(_factor(up_NF, name))


def activate_in_turn(x: Tensor, name: ActivationName, y: Tensor) -> None:
    """Put the activation into `y`, with torch's kernels."""
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
            activate_in_turn(x.clamp(max=_LARGEST), "quick-gelu", y)


def gate_backward_in_turn(
    dy_NF: Tensor, fused_NF2: Tensor, name: ActivationName, dgate_NF: Tensor, dup_NF: Tensor
) -> None:
    """Put the gradients of gate and up into `dgate_NF` and `dup_NF`, with torch's kernels."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    torch.mul(dy_NF, activate(gate_NF, name), out=dup_NF)
    if name == "clamped-silu":
        dup_NF.mul_(_is_unclamped(up_NF))
    activate_backward_in_turn(dy_NF * _factor(up_NF, name), gate_NF, name, dgate_NF)


def activate_backward_in_turn(dy: Tensor, x: Tensor, name: ActivationName, dx: Tensor) -> None:
    """Put the gradient of the activation's input into `dx`, with torch's kernels."""
    match name:
        case "silu":
            torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=dx)
        case "gelu" | "gelu-tanh":
            torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=_approximation(name), grad_input=dx)
        case _:
            dx.copy_(exact_activate_backward(dy, x, name))


# For the compiler, in float32: only the result is rounded.


def exact_gate(fused_NF2: Tensor, name: ActivationName) -> Tensor:
    """act(gate) x up, in the dtype of `fused_NF2`."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    return activate(gate_NF, name) * _factor(up_NF, name)


def exact_gate_backward(dy_NF: Tensor, fused_NF2: Tensor, name: ActivationName) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, in the dtype of the arguments."""
    gate_NF, up_NF = fused_NF2.chunk(2, dim=-1)
    dgate_NF = exact_activate_backward(dy_NF * _factor(up_NF, name), gate_NF, name)
    dup_NF = dy_NF * activate(gate_NF, name)
    return dgate_NF, dup_NF * _is_unclamped(up_NF) if name == "clamped-silu" else dup_NF


def exact_activate_backward(dy: Tensor, x: Tensor, name: ActivationName) -> Tensor:
    """The gradient of the activation's input, in the dtype of the arguments."""
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
            sigmoid = torch.sigmoid(_STEEPNESS * x)
            return dy * sigmoid * (1 + _STEEPNESS * x * (1 - sigmoid))
        case "clamped-silu":
            return exact_activate_backward(dy * (x <= _LARGEST), x.clamp(max=_LARGEST), "quick-gelu")
        case "gelu" | "gelu-tanh":
            return torch.ops.aten.gelu_backward(dy, x, approximate=_approximation(name))


def _factor(up: Tensor, name: ActivationName) -> Tensor:
    """The factor that multiplies act(gate): up, or for the clamped activation clamp(up) + 1."""
    return up.clamp(-_LARGEST, _LARGEST) + 1 if name == "clamped-silu" else up


def _is_unclamped(up: Tensor) -> Tensor:
    """A mask of the elements that the clamp does not change."""
    return up.abs() <= _LARGEST


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
