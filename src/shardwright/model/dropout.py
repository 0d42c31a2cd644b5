"""Dropout whose mask is a function of where an element is in the run, not of who computes it when.

Srivastava et al. 2014 (JMLR 15): set an element to zero with probability p, and scale the others by 1 / (1 - p).
A mask is a hash of (seed, step, layer, branch, sample in the global batch, position, channel). So every plan drops what
one rank drops, a recomputation drops it again, and neither masks nor generator states are kept. Salmon et al. 2011
(Parallel Random Numbers: As Easy as 1, 2, 3) make the case for such counter-based generators.

Shape suffixes: S sequence, B batch, H hidden, W = H / 4 rounded up, 64-bit words; s positions of this rank.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model.forward_pass import ForwardPass
from shardwright.model.positions import positions_tensor
from shardwright.parallel.tensor import Cut
from shardwright.spec.model import ModelSpec
from shardwright.spec.sequence import Ranges

CHANNELS_PER_WORD = 4  # 16 bits decide about an element, so p is rounded to a multiple of 2^-16
LEVELS = 1 << 16


class Dropout(nn.Module):
    """Dropout of hidden states at one place of the model."""

    def __init__(self, spec: ModelSpec, place: str, cut: Cut) -> None:
        """`place` names the place among all of the model, the same in every plan."""
        super().__init__()
        self.place = place
        self.sequence = spec.sequence
        self.positions = cut.held_between(spec.sequence)
        self.num_dropped_levels = min(round(spec.dropout * LEVELS), LEVELS - 1)

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        if self.num_dropped_levels == 0 or run.microbatch is None:
            return x_sBH
        mask = Mask(
            key=_key(run.microbatch.seed, run.microbatch.step, self.place),
            num_dropped_levels=self.num_dropped_levels,
            positions=self.positions,
            first_sample=run.microbatch.first_sample,
            sequence=self.sequence,
        )
        return _Drop.apply(x_sBH, mask)


@dataclass(frozen=True)
class Mask:
    """All that it takes to make a mask: a few numbers, and where the tokens are in the sequence. One in 65,536 elements
    is dropped for each dropped level."""

    key: int
    num_dropped_levels: int
    positions: Ranges
    first_sample: int
    sequence: int

    def apply(self, x_sBH: Tensor) -> Tensor:
        """A new tensor: x with some elements zero, the others scaled."""
        _, B, H = x_sBH.shape
        positions_s = positions_tensor(self.positions, x_sBH.device)
        samples_B = torch.arange(self.first_sample, self.first_sample + B, device=x_sBH.device)
        rows_sB = positions_s[:, None] + samples_B * self.sequence
        kept_sBH = kept_elements(rows_sB, H, self.key, self.num_dropped_levels)
        return (x_sBH * kept_sBH).mul_(LEVELS / (LEVELS - self.num_dropped_levels))


class _Drop(torch.autograd.Function):
    """Forward: zero some elements and scale the others. Backward: the same to the gradient; the mask is hashed again,
    for that is cheaper than to keep it."""

    @staticmethod
    def forward(ctx: Any, x_sBH: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask.apply(x_sBH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.mask.apply(grads[0]), None


def kept_elements(rows_sB: Tensor, channels: int, key: int, num_dropped_levels: int) -> Tensor:
    """Which elements stay, bool [s, B, channels]: all but about `num_dropped_levels` in 65,536.

    Element (row, channel) takes 16 bits of SplitMix64 (Steele, Lea and Flood 2014, figure 16) at position
    row x W + channel / 4 of the stream `key`.
    """
    words = -(-channels // CHANNELS_PER_WORD)
    step = 0x9E3779B97F4A7C15
    first_sB = rows_sB * _signed(words * step) + _signed(key)
    z_sBW = first_sB[..., None] + torch.arange(words, device=rows_sB.device) * _signed(step)
    shifted_sBW = torch.empty_like(z_sBW)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # int64 shifts copy the sign; masking it away makes the shift that of an unsigned number.
        torch.bitwise_right_shift(z_sBW, shift, out=shifted_sBW)
        z_sBW.bitwise_xor_(shifted_sBW.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            z_sBW.mul_(_signed(factor))
    levels_sBH = z_sBW.view(torch.int16)[..., :channels]
    return levels_sBH >= num_dropped_levels - LEVELS // 2


def _key(seed: int, step: int, place: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} dropout {place}".encode(), digest_size=8).digest(), "little")


def _signed(number: int) -> int:
    """The 64-bit integer with the same bits: torch's integers are signed, and wrap around."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
