"""Norms of queries and keys, other than a norm of each head with a weight.

A norm over all heads together: OLMo 2 (arXiv 2501.00656, section 3.1) and OLMoE (arXiv 2409.02060, section 4.2.5)
divide a token's queries by the root of their mean square over all heads, and its keys alike. Each tp rank has some of
the heads, so the sums are all-reduced: two numbers for each token, in forward and backward. A norm of each head without
a weight: Llama 4.

Shape suffixes: S sequence, B batch, G key/value heads of this rank, Q query heads of each, R = Q + 2, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded


class AllHeadsNorm(nn.Module):
    """The weight of a norm over all heads, of full shape [kv_heads, heads, D]: `heads` for each key/value head. It is
    sharded over tp as the heads are."""

    def __init__(self, spec: ModelSpec, heads: int, sharding: LayerSharding) -> None:
        super().__init__()
        self.weight = sharded((spec.num_kv_heads, heads, spec.head_size), 0, sharding.tp, "ones")


def norm_all_heads(qkv_SBGRD: Tensor, q_norm: AllHeadsNorm, k_norm: AllHeadsNorm, epsilon: float, tp: Axis) -> Tensor:
    """Queries and keys, each divided by the root of its mean square over the heads of all ranks, times its weight; and
    values, unchanged: [S, B, G, Q + 2, D]."""
    return _NormAllHeads.apply(qkv_SBGRD, q_norm.weight, k_norm.weight, epsilon, tp)


class _NormAllHeads(torch.autograd.Function):
    """Forward: sums squares, over ranks too; keeps its input and two numbers for each token. Backward: equation 4 of
    Zhang and Sennrich 2019 (arXiv 1910.07467), with the projection on the input summed over ranks too."""

    @staticmethod
    def forward(
        ctx: Any, qkv_SBGRD: Tensor, q_weight: PlacedParameter, k_weight: PlacedParameter, epsilon: float, tp: Axis
    ) -> Tensor:
        parts = _queries_and_keys(qkv_SBGRD)
        ctx.widths = [x[0, 0].numel() * tp.size for x in parts]
        squares_2SB = torch.stack([x.float().square().sum(dim=(2, 3, 4)) for x in parts])
        sums_2SB = all_reduce(squares_2SB, tp)
        inverse_2SB = torch.stack(
            [sums_SB.div(width).add_(epsilon).rsqrt_() for sums_SB, width in zip(sums_2SB, ctx.widths, strict=True)]
        )
        ctx.weights, ctx.tp = (q_weight, k_weight), tp
        ctx.save_for_backward(qkv_SBGRD, inverse_2SB)
        out_SBGRD = torch.empty_like(qkv_SBGRD, memory_format=torch.contiguous_format)
        normal = _queries_and_keys(out_SBGRD)
        for x, y, inverse_SB, weight in zip(parts, normal, inverse_2SB, ctx.weights, strict=True):
            y.copy_((x.float() * _over_heads(inverse_SB)).mul_(weight))
        out_SBGRD[..., -1, :].copy_(qkv_SBGRD[..., -1, :])
        return out_SBGRD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_SBGRD, inverse_2SB = ctx.saved_tensors
        normal, dnormal, projections = [], [], []
        pairs = zip(_queries_and_keys(qkv_SBGRD), _queries_and_keys(grads[0]), inverse_2SB, ctx.weights, strict=True)
        for x, dy, inverse_SB, weight in pairs:
            dy = dy.float()
            normal.append(x.float() * _over_heads(inverse_SB))
            weight.add_gradient((dy * normal[-1]).sum(dim=(0, 1)))
            dnormal.append(dy * weight)
            projections.append((dnormal[-1] * normal[-1]).sum(dim=(2, 3, 4)))
        projections_2SB = all_reduce(torch.stack(projections), ctx.tp)
        dqkv_SBGRD = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        for i, dx in enumerate(_queries_and_keys(dqkv_SBGRD)):
            mean = _over_heads(projections_2SB[i] / ctx.widths[i])
            dx.copy_(dnormal[i].sub_(normal[i].mul_(mean)).mul_(_over_heads(inverse_2SB[i])))
        dqkv_SBGRD[..., -1, :].copy_(grads[0][..., -1, :])
        return dqkv_SBGRD, None, None, None, None


def _queries_and_keys(qkv_SBGRD: Tensor) -> tuple[Tensor, Tensor]:
    return qkv_SBGRD[..., :-2, :], qkv_SBGRD[..., -2:-1, :]


def _over_heads(x_SB: Tensor) -> Tensor:
    return x_SB[..., None, None, None]


def plain_norm(x: Tensor, epsilon: float) -> Tensor:
    """Each vector along the last dim, divided by the root of its mean square."""
    return _PlainNorm.apply(x, epsilon)


class _PlainNorm(torch.autograd.Function):
    """Forward: in float32; keeps x and one number for each vector. Backward: equation 4 of Zhang and Sennrich 2019
    (arXiv 1910.07467) without a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        exact = x.float()
        inverse = exact.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, inverse)
        return (exact * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        dy, normal = grads[0].float(), x.float() * inverse
        projection = (dy * normal).mean(dim=-1, keepdim=True)
        return (dy - normal.mul_(projection)).mul_(inverse).to(x.dtype), None
