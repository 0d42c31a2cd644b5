"""Rotary positions. Su et al. 2021 (arXiv 2104.09864, section 3.2).

Pair i of the first E elements of a head is turned by the angle position x base^(-2i/E); the other elements stay. The
product of a query and a key then depends only on the difference of their positions. A pair is (i, i + E/2) in Llama's
checkpoints and (2i, 2i + 1) in DeepSeek's.

Shape suffixes: S sequence, B batch, G key/value heads, Q query heads of each, R = Q + 2, D head width, E turned
elements of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shardwright.config.rotary_scaling import RotaryScalingSpec
from shardwright.precision.fused_operator import fused_operator

PLAIN = RotaryScalingSpec()
_LEAST_RAMP = 1e-3  # width of a step, as in the released code of YaRN


def rotary_angles(
    positions_S: Tensor, width: int, base: float, scaling: RotaryScalingSpec = PLAIN, sequence: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair's angle, each [S, 1, 1, 1, E / 2], float32. `width` is E, and `sequence` the length
    of a sequence, on which some scalings depend."""
    exponents = torch.arange(0, width, 2, device=positions_S.device, dtype=torch.float32) / width
    frequencies = 1.0 / base**exponents
    frequencies = frequencies * _frequency_factors(frequencies, base, scaling, sequence)
    angles = positions_S.float()[:, None] * frequencies
    magnitude = scaling.turned_magnitude
    cosine, sine = angles.cos(), angles.sin()
    if magnitude != 1:
        cosine, sine = cosine * magnitude, sine * magnitude
    return cosine[:, None, None, None, :], sine[:, None, None, None, :]


def _frequency_factors(frequencies: Tensor, base: float, scaling: RotaryScalingSpec, sequence: int) -> Tensor | float:
    """The factor of each frequency, from 1 to 1 / factor."""
    match scaling.kind:
        case "none":
            return 1.0
        case "linear":
            return 1 / scaling.factor
        case "longrope":
            factors = torch.tensor(scaling.pair_factors(sequence), dtype=torch.float32)
            return 1 / factors.to(frequencies.device, non_blocking=True)
        case "yarn":
            ramp = _yarn_ramp(frequencies, base, scaling)
        case "llama3":
            num_turns = scaling.trained_sequence * frequencies / (2 * math.pi)
            width = max(scaling.turns_that_stay - scaling.slow, _LEAST_RAMP)
            ramp = ((scaling.turns_that_stay - num_turns) / width).clamp(0, 1)
    return ramp / scaling.factor + (1 - ramp)


def _yarn_ramp(frequencies: Tensor, base: float, yarn: RotaryScalingSpec) -> Tensor:
    """The place of each pair on YaRN's ramp: 0 for a pair that stays, 1 for a pair that is stretched by the full
    factor.

    Peng et al. 2023 (arXiv 2309.00071, section 3.2). The ramp is linear in the number of the pair. It begins and ends
    at whole numbers, as in the released code of YaRN and of DeepSeek, though not in the paper; gpt-oss does not round.
    """
    num_pairs = len(frequencies)

    def pair_that_turns(num_turns: float) -> float:
        return num_pairs * math.log(yarn.trained_sequence / (num_turns * 2 * math.pi)) / math.log(base)

    first, last = pair_that_turns(yarn.turns_that_stay), pair_that_turns(yarn.slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, device=frequencies.device, dtype=torch.float32)
    return ((pairs - first) / max(last - first, _LEAST_RAMP)).clamp(0, 1)


def split_and_rotate(qkv_SBGRD: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, B, G, Q, D] and keys [S, B, G, 1, D], turned, and values [S, B, G, 1, D]; R is Q + 2."""
    return _SplitAndRotate.apply(qkv_SBGRD, cosine, sine)


class _SplitAndRotate(torch.autograd.Function):
    """Forward: turns queries and keys, copies values: a view would keep all of qkv alive for the backward. Backward:
    turns the gradients back, into the one tensor that the qkv product's backward needs. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, qkv_SBGRD: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.cosine, ctx.sine = cosine, sine
        q, k, v = (qkv_SBGRD.new_empty(part.shape) for part in _parts(qkv_SBGRD))
        _split_and_turn(qkv_SBGRD, cosine, sine, q, k, v)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dq, dk, dv = grads
        S, B, G, Q, D = dq.shape
        dqkv_SBGRD = dq.new_empty(S, B, G, Q + 2, D)
        _turn_back(dq, dk, dv, ctx.cosine, ctx.sine, dqkv_SBGRD)
        return dqkv_SBGRD, None, None


def _parts(qkv_SBGRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_SBGRD.split((qkv_SBGRD.shape[3] - 2, 1, 1), dim=3)
    return q, k, v


def _split_and_turn_in_turn(
    qkv_SBGRD: Tensor, cosine: Tensor, sine: Tensor, to_q: Tensor, to_k: Tensor, to_v: Tensor
) -> None:
    q, k, v = _parts(qkv_SBGRD)
    _turn_first_in_turn(q, cosine, sine, to_q)
    _turn_first_in_turn(k, cosine, sine, to_k)
    to_v.copy_(v)


def _split_and_turn_at_once(
    qkv_SBGRD: Tensor, cosine: Tensor, sine: Tensor, to_q: Tensor, to_k: Tensor, to_v: Tensor
) -> None:
    q, k, v = _parts(qkv_SBGRD)
    to_q.copy_(_first_turned(q.float(), cosine, sine))
    to_k.copy_(_first_turned(k.float(), cosine, sine))
    to_v.copy_(v)


def _turn_back_in_turn(dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor, sine: Tensor, dqkv_SBGRD: Tensor) -> None:
    q, k, v = _parts(dqkv_SBGRD)
    _turn_first_in_turn(dq, cosine, -sine, q)
    _turn_first_in_turn(dk, cosine, -sine, k)
    v.copy_(dv)


def _turn_back_at_once(dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor, sine: Tensor, dqkv_SBGRD: Tensor) -> None:
    gradients = (_first_turned(gradient.float(), cosine, -sine) for gradient in (dq, dk))
    dqkv_SBGRD.copy_(torch.cat((*gradients, dv.float()), dim=3))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries or keys, [S, B, G, Q, D], turned."""
    return _Rotate.apply(x, cosine, sine)


class _Rotate(torch.autograd.Function):
    """Forward: turns x. Backward: turns the gradient back. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.cosine, ctx.sine = cosine, sine
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _turn_first(x, cosine, sine, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dx = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        _turn_first(grads[0], ctx.cosine, -ctx.sine, dx)
        return dx, None, None


def _turn_first(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    """Turn the first elements of the last dim, two for each angle, and copy the others."""
    width = 2 * cosine.shape[-1]
    if width == x.shape[-1]:
        turn(x, cosine, sine, out)
        return
    turn(x[..., :width], cosine, sine, out[..., :width])
    out[..., width:].copy_(x[..., width:])


def _turn_first_in_turn(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    width = 2 * cosine.shape[-1]
    _turn_in_turn(x[..., :width], cosine, sine, False, out[..., :width])
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])


def _first_turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """A copy of x with the first elements of the last dim turned, two for each angle."""
    width = 2 * cosine.shape[-1]
    first = _turned(x[..., :width], cosine, sine, interleaved=False)
    return torch.cat((first, x[..., width:]), dim=-1) if width < x.shape[-1] else first


def turn(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor, interleaved: bool = False) -> None:
    """Turn each pair of the last dim of `x` by its angle and put it into `out`. Computed in float32; one kernel on
    CUDA.

    The first elements of the pairs are the first half of the last dim, or its even elements if `interleaved`.
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


def _elements(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second element of each pair, as views."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def _turn_at_once(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, out: Tensor) -> None:
    out.copy_(_turned(x.float(), cosine, sine, interleaved))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """A turned copy of x. The partner of an element is read by its place in memory, without a branch in the kernel."""
    dim = -1 if interleaved else -2
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    signs = 2.0 * torch.arange(2, device=x.device) - 1.0  # the first element subtracts, the second adds
    signs = signs if interleaved else signs[:, None]
    return (pairs * cosine.unsqueeze(dim) + signs * (pairs.flip(dim) * sine.unsqueeze(dim))).flatten(-2)


_turn = fused_operator(
    "turn(Tensor x, Tensor cosine, Tensor sine, bool interleaved, Tensor(a!) out) -> ()", _turn_in_turn, _turn_at_once
)
_split_and_turn = fused_operator(
    "split_and_turn(Tensor qkv, Tensor cosine, Tensor sine, Tensor(a!) q, Tensor(b!) k, Tensor(c!) v) -> ()",
    _split_and_turn_in_turn,
    _split_and_turn_at_once,
)
_turn_back = fused_operator(
    "turn_back(Tensor dq, Tensor dk, Tensor dv, Tensor cosine, Tensor sine, Tensor(a!) dqkv) -> ()",
    _turn_back_in_turn,
    _turn_back_at_once,
)
