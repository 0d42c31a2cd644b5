"""How often each expert is named, and how the host learns of it: without a word, or with one word while it works on."""

import torch
from torch import Tensor


class HostNumbers:
    """Whole numbers of a device on their way to the host, which may launch other work until it reads them."""

    def __init__(self, values_N: Tensor) -> None:
        self._values_N, self._there = values_N, None
        if values_N.is_cuda:
            self._values_N = torch.empty(values_N.shape, dtype=values_N.dtype, pin_memory=True)
            self._values_N.copy_(values_N, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[int]:
        """The numbers. Blocks until they are there, and no longer: what was launched since goes on."""
        if self._there is not None:
            self._there.synchronize()
        return [int(value) for value in self._values_N.tolist()]


def count_each(experts: Tensor, num_experts: int) -> Tensor:
    """How often each of so many experts stands in a tensor of any shape, [E], int64; E itself stands for none.

    torch.bincount would do, but for CUDA, where the host waits to learn how large its result is.
    """
    numbers = experts.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:num_experts]
