"""Rotary positions. Su et al. 2021 (arXiv 2104.09864, section 3.2), in the half-split layout of Llama checkpoints.

Pair (i, i + D/2) of a head is turned by position x base^(-2i/D). Products of queries and keys then depend on the
difference of their positions alone.

Shape suffixes: S sequence, B batch, N heads, D head width.
"""

import torch
from torch import Tensor


def rotary_angles(positions_S: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [S, 1, 1, D / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float32) / head_dim
    angles = positions_S.float()[:, None] * (1.0 / base**exponents)
    return angles.cos()[:, None, None, :], angles.sin()[:, None, None, :]


def rotate(x_SBND: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair by its angle."""
    first, second = x_SBND.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x_SBND.dtype)
