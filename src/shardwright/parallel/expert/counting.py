"""How often each expert is named, without a word between device and host."""

import torch
from torch import Tensor


def count_each(experts: Tensor, num_experts: int) -> Tensor:
    """How often each of so many experts stands in a tensor of any shape, [E], int64; E itself stands for none.

    torch.bincount would do, but for CUDA, where the host waits to learn how large its result is.
    """
    numbers = experts.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:num_experts]
