"""Attention and positions of the plain decoder (plain_decoder.py): rules written from their descriptions.

Shape suffixes as there.
"""

import math

import torch
from torch import Tensor

from shardwright.config.model import ModelSpec
from shardwright.config.rotary_scaling import RotaryScalingSpec


def scale(spec: ModelSpec) -> float:
    """The factor of scores."""
    scaling = spec.rotary_scaling
    heat = (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2 if scaling.kind == "yarn" else 1.0
    return heat * (spec.attention_scale or 1 / math.sqrt(spec.query_width))


def rotated(spec: ModelSpec, x: Tensor, is_interleaved: bool, layer: int = 0) -> Tensor:
    """[B, S, G, Q, D] with each pair of the elements that are turned by its angle: (2i, 2i + 1), or (i, i + D / 2)."""
    if spec.rotary_dim and spec.rotary_dim < x.shape[-1]:
        x, rest = x.split((spec.rotary_dim, x.shape[-1] - spec.rotary_dim), dim=-1)
        return torch.cat((rotated(spec, x, is_interleaved, layer), rest), dim=-1)
    window = spec.window
    if not all(in_reach(spec, layer, i, 0) for i in (0, window.size)):
        scaling = spec.rotary_scaling if window.rotary_scaled else RotaryScalingSpec()
        base = window.rotary_base or spec.rotary_base
        spec = spec.model_copy(update={"rotary_base": base, "rotary_scaling": scaling})
    S, D = x.shape[1], x.shape[-1]
    angles = torch.arange(S)[:, None].double() * frequencies(spec, D)
    cosine, sine = (y[:, None, None] * _magnitude(spec) for y in (angles.cos(), angles.sin()))
    first, second = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., : D // 2], x[..., D // 2 :])
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.stack(turned, dim=-1).flatten(-2) if is_interleaved else torch.cat(turned, dim=-1)


def attended(
    spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, sees_BSS: Tensor, sinks_N: Tensor | None = None
) -> Tensor:
    """Softmax over what each token sees, [B, S, N, D] to [B, S, N, E]."""
    S = q.shape[1]
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * scale(spec)
    if spec.attention_softcap:
        scores = spec.attention_softcap * (scores / spec.attention_softcap).tanh()
    if spec.positions == "alibi":
        behind = torch.arange(S)[:, None] - torch.arange(S)
        scores = scores - torch.tensor(_slopes(spec.heads), dtype=torch.float64)[:, None, None] * behind
    scores = scores.masked_fill(~sees_BSS[:, None], -math.inf)
    if sinks_N is not None:
        beside = sinks_N[:, None, None].expand(len(q), -1, S, 1)
        scores = torch.cat((scores, beside), dim=-1)
    return torch.einsum("bnst,btne->bsne", scores.softmax(-1)[..., :S], v)


def reached(spec: ModelSpec, layer: int, positions_BS: Tensor) -> Tensor:
    """Which keys of its document a layer's window leaves to each query, [B, S, S]; positions are those within it."""
    rows = positions_BS.tolist()
    return torch.tensor([[[in_reach(spec, layer, i, j) for j in row] for i in row] for row in rows])


def in_reach(spec: ModelSpec, layer: int, query: int, key: int) -> bool:
    """True if a layer's window, if it has one, leaves a key to a query."""
    window = spec.window
    place = layer + (not window.full_first)
    is_full = layer < window.first_full or (window.full_every and place % window.full_every == 0)
    if not window.size or is_full:
        return True
    return query // window.size == key // window.size if window.chunked else query - key < window.size


def _slopes(heads: int) -> list[float]:
    """ALiBi (arXiv 2108.12409): a geometric sequence from 2^(-8/n), and for other numbers of heads as released."""
    if heads & (heads - 1) == 0:
        return [(2 ** (-8 / heads)) ** (i + 1) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return _slopes(below) + _slopes(2 * below)[0::2][: heads - below]


def is_turned(spec: ModelSpec, layer: int) -> bool:
    """True if a layer has rotary positions."""
    return spec.positions == "rotary" and (not spec.no_rotary_every or (layer + 1) % spec.no_rotary_every != 0)


def _magnitude(spec: ModelSpec) -> float:
    """The factor of cosines and sines."""
    scaling = spec.rotary_scaling
    if scaling.magnitude:
        return scaling.magnitude
    if scaling.kind == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.trained_sequence))
    if scaling.kind != "yarn":
        return 1.0
    mscale, of_all = (0.1 * x * math.log(scaling.factor) + 1 for x in (scaling.mscale, scaling.mscale_all_dim))
    return mscale / of_all


def frequencies(spec: ModelSpec, D: int) -> Tensor:
    """The angle by which pair i of a head turns in one position, [D / 2]."""
    plain = spec.rotary_base ** (-torch.arange(0, D, 2).double() / D)
    scaling = spec.rotary_scaling
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        factors = scaling.long_factors if spec.sequence > scaling.trained_sequence else scaling.short_factors
        return plain / torch.tensor(factors, dtype=torch.float64)
    fast = scaling.fast or {"yarn": 32.0, "llama3": 4.0}[scaling.kind]
    if scaling.kind == "llama3":  # a ramp in how often a pair turns in the sequence of before
        turns = scaling.trained_sequence * plain / (2 * math.pi)
        stays = ((turns - scaling.slow) / (fast - scaling.slow)).clamp(0, 1)
        return plain * (stays + (1 - stays) / scaling.factor)

    # YaRN (arXiv 2309.00071, section 3.2): a ramp in the number of the pair.
    def pair(turns: float) -> float:
        return D * math.log(scaling.trained_sequence / (2 * math.pi * turns)) / (2 * math.log(spec.rotary_base))

    low, high = pair(fast), pair(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    ramp = torch.tensor([min(1.0, max(0.0, (i - low) / max(high - low, 1e-3))) for i in range(D // 2)])
    return plain * (ramp / scaling.factor + (1 - ramp))
