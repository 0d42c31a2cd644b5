"""Positions of tokens as tensors: where a rank's tokens stand in the sequence, and how they are picked from it.

Shape suffixes: S sequence, s positions of this rank, B batch.
"""

import torch
from torch import Tensor

from shardwright.sharding.sequence import Ranges


def positions_tensor(ranges: Ranges, device: torch.device) -> Tensor:
    """The positions, [s], int64."""
    if len(ranges) == 1:
        return torch.arange(ranges[0].start, ranges[0].stop, device=device)
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in ranges])


def pick(x_BS: Tensor, ranges: Ranges) -> Tensor:
    """The elements at the positions, [B, s]: a view, if they are one range."""
    parts = [x_BS[:, r.start : r.stop] for r in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
