"""Positions of a rank's tokens in the sequence as tensors, and the selection of elements at these positions.

Shape suffixes: S sequence, s positions of this rank, B batch.
"""

import torch
from torch import Tensor

from shardwright.sharding.sequence import Ranges


def positions_tensor(ranges: Ranges, device: torch.device) -> Tensor:
    """The positions in the ranges, [s], int64."""
    if len(ranges) == 1:
        return torch.arange(ranges[0].start, ranges[0].stop, device=device)
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in ranges])


def pick(x_BS: Tensor, ranges: Ranges) -> Tensor:
    """The elements at the positions in the ranges, [B, s]: a view, if there is one range."""
    parts = [x_BS[:, r.start : r.stop] for r in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
