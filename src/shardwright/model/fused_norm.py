"""RMSNorm and its backward in one kernel each, on CUDA, as operators of which dry runs know the shapes.

The kernels are torch's. Under their public name autograd keeps the weight, which may be let go and gathered again
meanwhile; the names used here are not public, and on torch's device meta they fall apart into many operators.
"""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float epsilon) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor dy, Tensor x, Tensor inverse, Tensor? weight) -> (Tensor, Tensor)")


def rms_norm(x_NH: Tensor, weight_H: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) x weight, if there is one, in the numbers of x, and 1 / rms(x) of each vector, [..., 1], float32."""
    found: tuple[Tensor, Tensor] = torch.ops.shardwright.rms_norm(x_NH, weight_H, epsilon)
    return found


def rms_norm_backward(
    dy_NH: Tensor, x_NH: Tensor, inverse_N1: Tensor, weight_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, in their numbers; without a weight the second says nothing."""
    found: tuple[Tensor, Tensor] = torch.ops.shardwright.rms_norm_backward(dy_NH, x_NH, inverse_N1, weight_H)
    return found


@torch.library.impl(_LIBRARY, "rms_norm", "CUDA")
def _forward(x_NH: Tensor, weight_H: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x_NH, x_NH.shape[-1:], weight_H, epsilon)
    return found


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
