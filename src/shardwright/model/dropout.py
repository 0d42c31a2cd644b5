"""Dropout whose mask depends on an element's place in the run, not on the rank or the time of its computation.

Srivastava et al. 2014 (JMLR 15): set an element to zero with probability p, and scale the others by 1 / (1 - p).
A mask is a hash of (seed, step, layer, branch, sample in the global batch, position, channel). So every plan drops the
same elements as one rank does, and so does a recompute; no masks or generator states are kept (counter_rng.py).

Shape suffixes: S sequence, B batch, H hidden, W = H / 4 rounded up, 64-bit words; s positions of this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.position_tables import positions_tensor
from shardwright.parallel.tensor.counter_rng import random_words, stream_key
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.sharding.sequence import Ranges

CHANNELS_PER_WORD = 4  # 16 bits for each element, so p is rounded to a multiple of 2^-16
LEVELS = 1 << 16


class Dropout(nn.Module):
    """Dropout of hidden states at one place of the model."""

    def __init__(self, spec: ModelSpec, place: str, sharding: LayerSharding) -> None:
        """`place` is the unique name of the place in the model, the same in every plan."""
        super().__init__()
        self.place = place
        self.sequence = spec.sequence
        self.positions = sharding.held_between(spec.sequence)
        self.num_dropped_levels = min(round(spec.dropout * LEVELS), LEVELS - 1)

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        if self.num_dropped_levels == 0 or run.microbatch is None:
            return x_sBH
        mask = Mask(
            key=stream_key(run.microbatch.seed, run.microbatch.step, f"dropout {self.place}"),
            num_dropped_levels=self.num_dropped_levels,
            positions=self.positions,
            first_sample=run.microbatch.first_sample,
            sequence=self.sequence,
        )
        return _Drop.apply(x_sBH, mask)


@dataclass(frozen=True)
class Mask:
    """The numbers that define a mask, and the positions of the tokens in the sequence. One in 65,536 elements is
    dropped for each dropped level."""

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
    """Forward: zeroes some elements and scales the others. Backward: the same for the gradient; it recomputes the mask,
    which is cheaper than to keep it."""

    @staticmethod
    def forward(ctx: Any, x_sBH: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask.apply(x_sBH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.mask.apply(grads[0]), None


def kept_elements(rows_sB: Tensor, channels: int, key: int, num_dropped_levels: int) -> Tensor:
    """A mask of the elements that stay, bool [s, B, channels]: all but about `num_dropped_levels` in 65,536.

    Element (row, channel) uses 16 bits of word channel / 4 of the row, in the random stream `key`.
    """
    z_sBW = random_words(rows_sB, -(-channels // CHANNELS_PER_WORD), key)
    levels_sBH = z_sBW.view(torch.int16)[..., :channels]
    return levels_sBH >= num_dropped_levels - LEVELS // 2
