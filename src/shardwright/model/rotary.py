"""Rotary positions. Su et al. 2021 (arXiv 2104.09864, section 3.2), in the half-split layout of Llama checkpoints.

Pair (i, i + D/2) of a head is turned by position x base^(-2i/D). Products of queries and keys then depend on the
difference of their positions alone.

Shape suffixes: S sequence, B batch, G key/value heads, Q query heads of each, R = Q + 2, D head width.
"""

from typing import Any

import torch
from torch import Tensor


def rotary_angles(positions_S: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [S, 1, 1, 1, D / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float32) / head_dim
    angles = positions_S.float()[:, None] * (1.0 / base**exponents)
    return angles.cos()[:, None, None, None, :], angles.sin()[:, None, None, None, :]


def split_and_rotate(qkv_SBGRD: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, B, G, Q, D] and keys [S, B, G, 1, D], turned, and values [S, B, G, 1, D]; R is Q + 2."""
    return _SplitAndRotate.apply(qkv_SBGRD, cosine, sine)


class _SplitAndRotate(torch.autograd.Function):
    """Forward: turn queries and keys, copy values: views would keep all of qkv for the backward, for a part of it.
    Backward: turn the gradients back, straight into the one tensor that the product before needs. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, qkv_SBGRD: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.cosine, ctx.sine = cosine, sine
        q, k, v = _parts(qkv_SBGRD)
        turned = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        for x, out in zip((q, k), turned, strict=True):
            _turn(x, cosine, sine, out)
        return turned[0], turned[1], v.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dq, dk, dv = grads
        S, B, G, Q, D = dq.shape
        dqkv_SBGRD = dq.new_empty(S, B, G, Q + 2, D)
        q, k, v = _parts(dqkv_SBGRD)
        _turn(dq, ctx.cosine, -ctx.sine, q)
        _turn(dk, ctx.cosine, -ctx.sine, k)
        v.copy_(dv)
        return dqkv_SBGRD, None, None


def _parts(qkv_SBGRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_SBGRD.split((qkv_SBGRD.shape[3] - 2, 1, 1), dim=3)
    return q, k, v


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    """Turn each pair of the last dim by its angle, in float32."""
    exact = out if out.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    first, second = x.chunk(2, dim=-1)
    to_first, to_second = exact.chunk(2, dim=-1)
    torch.mul(first, cosine, out=to_first).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=to_second).addcmul_(first, sine)
    if exact is not out:
        out.copy_(exact)
