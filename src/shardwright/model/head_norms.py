"""Norms of queries and keys that are not one of each head with a weight.

Of all heads together, before they are split: OLMo 2 (arXiv 2501.00656, section 3.1) and OLMoE (arXiv 2409.02060,
section 4.2.5) divide a token's queries by the root of their mean square over all heads, and its keys by theirs. Each
rank of tp has some of the heads, so these sums go over the ranks: two numbers a token, forward and backward. Of each
head, without a weight: Llama 4.

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
    """The weight of a norm over `heads` of each key/value head, whole [kv_heads, heads, D]. Ranks of tp share it as
    they do the heads."""

    def __init__(self, spec: ModelSpec, heads: int, sharding: LayerSharding) -> None:
        super().__init__()
        self.weight = sharded((spec.num_kv_heads, heads, spec.head_size), 0, sharding.tp, "ones")


def norm_all_heads(qkv_SBGRD: Tensor, q_norm: AllHeadsNorm, k_norm: AllHeadsNorm, epsilon: float, tp: Axis) -> Tensor:
    """Queries and keys divided by the roots of their mean squares over the heads of all ranks, times their weights, and
    values as they are: [S, B, G, Q + 2, D]."""
    return _NormAllHeads.apply(qkv_SBGRD, q_norm.weight, k_norm.weight, epsilon, tp)


class _NormAllHeads(torch.autograd.Function):
    """Forward: squares are summed, over ranks too. Keeps its input and two numbers a token. Backward: equation 4 of
    Zhang and Sennrich 2019 (arXiv 1910.07467), where what is along the input is summed over ranks too."""

    @staticmethod
    def forward(
        ctx: Any, qkv_SBGRD: Tensor, q_weight: PlacedParameter, k_weight: PlacedParameter, epsilon: float, tp: Axis
    ) -> Tensor:
        parts = _queries_and_keys(qkv_SBGRD)
        ctx.widths = [x[0, 0].numel() * tp.size for x in parts]
        squares_2SB = torch.stack([x.float().square().sum(dim=(2, 3, 4)) for x in parts])
        sums_2SB = all_reduce(squares_2SB, tp)
        inverse_2SB = torch.stack(
            [s.div(width).add_(epsilon).rsqrt_() for s, width in zip(sums_2SB, ctx.widths, strict=True)]
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
        normal, dnormal, along = [], [], []
        pairs = zip(_queries_and_keys(qkv_SBGRD), _queries_and_keys(grads[0]), inverse_2SB, ctx.weights, strict=True)
        for x, dy, inverse_SB, weight in pairs:
            dy = dy.float()
            normal.append(x.float() * _over_heads(inverse_SB))
            weight.add_gradient((dy * normal[-1]).sum(dim=(0, 1)))
            dnormal.append(dy * weight)
            along.append((dnormal[-1] * normal[-1]).sum(dim=(2, 3, 4)))
        along_2SB = all_reduce(torch.stack(along), ctx.tp)
        dqkv_SBGRD = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        for i, dx in enumerate(_queries_and_keys(dqkv_SBGRD)):
            mean = _over_heads(along_2SB[i] / ctx.widths[i])
            dx.copy_(dnormal[i].sub_(normal[i].mul_(mean)).mul_(_over_heads(inverse_2SB[i])))
        dqkv_SBGRD[..., -1, :].copy_(grads[0][..., -1, :])
        return dqkv_SBGRD, None, None, None, None


def _queries_and_keys(qkv_SBGRD: Tensor) -> tuple[Tensor, Tensor]:
    return qkv_SBGRD[..., :-2, :], qkv_SBGRD[..., -2:-1, :]


def _over_heads(x_SB: Tensor) -> Tensor:
    return x_SB[..., None, None, None]


def plain_norm(x: Tensor, epsilon: float) -> Tensor:
    """Vectors along the last dim, divided by the roots of their mean squares."""
    return _PlainNorm.apply(x, epsilon)


class _PlainNorm(torch.autograd.Function):
    """Forward: in float32; keeps x and one number a vector. Backward: equation 4 of Zhang and Sennrich 2019 (arXiv
    1910.07467) without a weight."""

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
        along = (dy * normal).mean(dim=-1, keepdim=True)
        return (dy - normal.mul_(along)).mul_(inverse).to(x.dtype), None
