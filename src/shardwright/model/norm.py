"""Normalisation: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450).

Under sequence parallel each tp rank normalises its own tokens, and so has only a part of the weight's gradient.

Shape suffixes: S sequence (s = S / tp under sequence parallel), B batch, H hidden, or the width of a head or latent.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, whole


class Norm(nn.Module):
    """Normalises the last dim, of `width` elements, or hidden if that is 0.

    `summed_over` is the axis whose ranks each compute a part of the weight's gradient; None: that of sequence parallel.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sharding: LayerSharding,
        width: int = 0,
        summed_over: Axis | None = None,
        learning_biases: int = -1,
    ) -> None:
        """The first `learning_biases` elements of the bias learn, or all if that is -1. Later operators cancel the
        others: their gradient would be rounding noise, and Adam turns noise into steps."""
        super().__init__()
        self.epsilon, self.kind = spec.norm_epsilon, sharding.tp.kind
        shape, axis = (width or spec.hidden,), summed_over or sharding.summed_over
        self.centres = spec.norm == "layernorm"
        self.learning_biases = shape[0] if learning_biases < 0 else learning_biases
        self.weight = whole(shape, "ones", summed_over=axis) if spec.norm_weight else None
        has_bias = spec.norm_weight and spec.norm_bias and self.centres
        self.bias = whole(shape, "zeros", summed_over=axis) if has_bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] to [S, B, H]; any number of dims may precede H."""
        if not self.centres:
            return _RmsNorm.apply(x_SBH, self.weight, self.epsilon, self.kind)
        return _LayerNorm.apply(x_SBH, self.weight, self.bias, self.epsilon, self.learning_biases)


class _RmsNorm(torch.autograd.Function):
    """Forward: x / rms(x) x weight, if there is a weight, in float32; keeps x and one number for each token. Backward:
    equation 4 of the paper.

    On CUDA forward and backward are one kernel each. torch's own RMSNorm for a CPU is several
    operators, which also keep x / rms(x) and take several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, weight_H: PlacedParameter | None, epsilon: float, kind: str) -> Tensor:
        ctx.kind, ctx.weight = kind, weight_H
        if kind == "cuda":
            y_SBH, inverse_SB1 = rms_norm(x_SBH, weight_H, epsilon)
        else:
            exact_SBH = x_SBH.float()
            inverse_SB1 = exact_SBH.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
            normal_SBH = exact_SBH * inverse_SB1
            y_SBH = (normal_SBH if weight_H is None else normal_SBH.mul_(weight_H)).to(x_SBH.dtype)
        ctx.save_for_backward(x_SBH, inverse_SB1)
        return y_SBH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_SBH, inverse_SB1 = ctx.saved_tensors
        weight_H: PlacedParameter | None = ctx.weight
        if ctx.kind == "cuda":
            dx_SBH, dweight_H = rms_norm_backward(grads[0].contiguous(), x_SBH, inverse_SB1, weight_H)
            if weight_H is not None:
                weight_H.add_gradient(dweight_H)
            return dx_SBH, None, None, None
        dy_SBH = grads[0].float()
        normal_SBH = x_SBH.float() * inverse_SB1
        if weight_H is not None:
            weight_H.add_gradient((dy_SBH * normal_SBH).sum(dim=tuple(range(dy_SBH.dim() - 1))))
        dnormal_SBH = dy_SBH.clone() if weight_H is None else dy_SBH * weight_H
        projection_SB1 = (dnormal_SBH * normal_SBH).mean(dim=-1, keepdim=True)
        return dnormal_SBH.sub_(normal_SBH.mul_(projection_SB1)).mul_(inverse_SB1).to(x_SBH.dtype), None, None, None


class _LayerNorm(torch.autograd.Function):
    """torch's forward and backward, but the weight is not saved for the backward: ZeRO may free and gather it again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weight_H: PlacedParameter | None,
        bias_H: PlacedParameter | None,
        epsilon: float,
        learning_biases: int,
    ) -> Tensor:
        y_SBH, mean_SB1, inverse_SB1 = torch.native_layer_norm(x_SBH, x_SBH.shape[-1:], weight_H, bias_H, epsilon)
        ctx.save_for_backward(x_SBH, mean_SB1, inverse_SB1)
        ctx.weight, ctx.bias, ctx.learning_biases = weight_H, bias_H, learning_biases
        return y_SBH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x_SBH, mean_SB1, inverse_SB1 = ctx.saved_tensors
        learns, has_bias = ctx.weight is not None, ctx.bias is not None
        dx_SBH, dweight_H, dbias_H = torch.ops.aten.native_layer_norm_backward(
            grads[0].contiguous(),
            x_SBH,
            x_SBH.shape[-1:],
            mean_SB1,
            inverse_SB1,
            ctx.weight,
            ctx.bias,
            [True, learns, has_bias],
        )
        if learns:
            ctx.weight.add_gradient(dweight_H)
        if has_bias:
            if ctx.learning_biases < len(dbias_H):
                dbias_H[ctx.learning_biases :] = 0
            ctx.bias.add_gradient(dbias_H)
        return dx_SBH, None, None, None, None


# torch's kernels of RMSNorm for CUDA, as operators whose shapes dry runs know. Under their public name autograd keeps
# the weight, which ZeRO may free and gather again before the backward. The names used here are private, and on torch's
# device meta they decompose into many operators.

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
def _rms_norm_on_cuda(x_NH: Tensor, weight_H: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    y_and_inverse: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x_NH, x_NH.shape[-1:], weight_H, epsilon)
    return y_and_inverse


@torch.library.impl(_LIBRARY, "rms_norm_backward", "CUDA")
def _rms_norm_backward_on_cuda(
    dy_NH: Tensor, x_NH: Tensor, inverse_N1: Tensor, weight_H: Tensor | None
) -> tuple[Tensor, Tensor]:
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
