"""RMSNorm and its backward on CUDA, one kernel each, as operators whose shapes dry runs know.

The kernels are torch's. Under their public name autograd keeps the weight, which ZeRO may free and gather again before
the backward. The names used here are private, and on torch's device meta they decompose into many operators.
"""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float epsilon) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor dy, Tensor x, Tensor inverse, Tensor? weight) -> (Tensor, Tensor)")


def rms_norm(x_NH: Tensor, weight_H: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) x weight, if there is a weight, in the dtype of x, and 1 / rms(x) of each vector, [..., 1],
    float32."""
    y_and_inverse: tuple[Tensor, Tensor] = torch.ops.shardwright.rms_norm(x_NH, weight_H, epsilon)
    return y_and_inverse


def rms_norm_backward(
    dy_NH: Tensor, x_NH: Tensor, inverse_N1: Tensor, weight_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, in their dtypes; without a weight the second is empty."""
    gradients: tuple[Tensor, Tensor] = torch.ops.shardwright.rms_norm_backward(dy_NH, x_NH, inverse_N1, weight_H)
    return gradients


@torch.library.impl(_LIBRARY, "rms_norm", "CUDA")
def _forward(x_NH: Tensor, weight_H: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    y_and_inverse: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x_NH, x_NH.shape[-1:], weight_H, epsilon)
    return y_and_inverse


@torch.library.impl(_LIBRARY, "rms_norm_backward", "CUDA")
def _backward(dy_NH: Tensor, x_NH: Tensor, inverse_N1: Tensor, weight_H: Tensor | None) -> tuple[Tensor, Tensor]:
    dx_NH, dweight_H = torch.ops.aten._fused_rms_norm_backward(
        dy_NH, x_NH, x_NH.shape[-1:], inverse_N1, weight_H, [True, weight_H is not None]
    )
    return dx_NH, x_NH.new_empty(0) if weight_H is None else dweight_H


@torch.library.impl(_LIBRARY, "rms_norm", "Meta")
def _shapes(x_NH: Tensor, weight_H: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_NH), x_NH.new_empty(*x_NH.shape[:-1], 1, dtype=torch.float32)


@torch.library.impl(_LIBRARY, "rms_norm_backward", "Meta")
def _shapes_of_backward(
    dy_NH: Tensor, x_NH: Tensor, inverse_N1: Tensor, weight_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_NH), x_NH.new_empty(0) if weight_H is None else torch.empty_like(weight_H)
