"""Rotary positions. Su et al. 2021 (arXiv 2104.09864, section 3.2).

Pair i of a head is turned by position x base^(-2i/D). Products of queries and keys then depend on the difference of
their positions alone. A pair is (i, i + D/2) in Llama's checkpoints and (2i, 2i + 1) in DeepSeek's.

Shape suffixes: S sequence, B batch, G key/value heads, Q query heads of each, R = Q + 2, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shardwright.config.yarn import YarnSpec
from shardwright.precision.fused_operator import fused_operator

PLAIN = YarnSpec()


def rotary_angles(positions_S: Tensor, head_dim: int, base: float, yarn: YarnSpec = PLAIN) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [S, 1, 1, 1, D / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / base**exponents
    if yarn.factor > 1:
        frequencies = frequencies * _stretch(frequencies, head_dim, base, yarn)
    angles = positions_S.float()[:, None] * frequencies
    return angles.cos()[:, None, None, None, :], angles.sin()[:, None, None, None, :]


def _stretch(frequencies: Tensor, head_dim: int, base: float, yarn: YarnSpec) -> Tensor:
    """What YaRN multiplies each frequency with, from 1 to 1 / factor.

    Peng et al. 2023 (arXiv 2309.00071, section 3.2). The ramp is linear in the number of the pair and begins and ends
    at whole numbers: so it is in the released code, theirs and DeepSeek's, though not in the paper.
    """

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(yarn.trained_sequence / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(yarn.fast)), 0)
    last = min(math.ceil(pair_that_turns(yarn.slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=frequencies.device, dtype=torch.float32)
    slow = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return slow / yarn.factor + (1 - slow)


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
            turn(x, cosine, sine, out)
        return turned[0], turned[1], v.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dq, dk, dv = grads
        S, B, G, Q, D = dq.shape
        dqkv_SBGRD = dq.new_empty(S, B, G, Q + 2, D)
        q, k, v = _parts(dqkv_SBGRD)
        turn(dq, ctx.cosine, -ctx.sine, q)
        turn(dk, ctx.cosine, -ctx.sine, k)
        v.copy_(dv)
        return dqkv_SBGRD, None, None


def _parts(qkv_SBGRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_SBGRD.split((qkv_SBGRD.shape[3] - 2, 1, 1), dim=3)
    return q, k, v


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries or keys alone, [S, B, G, Q, D], turned."""
    return _Rotate.apply(x, cosine, sine)


class _Rotate(torch.autograd.Function):
    """Forward: turn. Backward: turn the gradient back. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.cosine, ctx.sine = cosine, sine
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        turn(x, cosine, sine, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dx = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        turn(grads[0], ctx.cosine, -ctx.sine, dx)
        return dx, None, None


def turn(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor, interleaved: bool = False) -> None:
    """Turn each pair of the last dim of `x` by its angle into `out`, computed in float32; on CUDA in one kernel.

    Halves of the last dim are the two elements of the pairs, or if `interleaved` its even and its odd elements.
    """
    _turn(x, cosine, sine, interleaved, out)


def _turn_in_turn(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, out: Tensor) -> None:
    exact = out if out.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    first, second = _elements(x, interleaved)
    to_first, to_second = _elements(exact, interleaved)
    torch.mul(first, cosine, out=to_first).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=to_second).addcmul_(first, sine)
    if exact is not out:
        out.copy_(exact)


def _turn_at_once(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, out: Tensor) -> None:
    first, second = _elements(x.float(), interleaved)
    turned = first * cosine - second * sine, second * cosine + first * sine
    out.copy_(torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1))


_turn = fused_operator(
    "turn(Tensor x, Tensor cosine, Tensor sine, bool interleaved, Tensor(a!) out) -> ()", _turn_in_turn, _turn_at_once
)


def _elements(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second element of each pair, as views."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
