"""Counts of how often each expert is chosen, and their asynchronous copy to the host."""

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams, Event, streams_of


class HostNumbers:
    """Integers that a device copies to the host, which may launch other work until it reads them."""

    def __init__(self, values_N: Tensor, streams: DeviceStreams | None = None) -> None:
        """`streams` are by default those of the tensor's device."""
        self._streams = streams = streams or streams_of(values_N.device)
        self._values_N = values_N
        self._copy_end: Event | None = None
        self._numbers: list[int] | None = None
        if streams is not None:
            self._values_N, self._copy_end = streams.sent(values_N)

    def read(self, dry: list[int] | None = None) -> list[int]:
        """The numbers; in a dry run, in which tensors have no values, those in `dry`. Blocks until the copy is over,
        and not until work that was launched after it is."""
        if self._numbers is None:
            if self._copy_end is not None:
                self._copy_end.synchronize()
            if self._streams is not None:
                self._streams.host_reads(self._values_N)
            self._numbers = [int(value) for value in self._values_N.tolist()] if dry is None else dry
        return self._numbers


def count_each(experts: Tensor, num_experts: int) -> Tensor:
    """The number of times that each of `num_experts` experts occurs in a tensor of any shape, [E], int64. The number E
    means no expert.

    torch.bincount is not used, since on CUDA the host waits for the size of its result.
    """
    numbers = experts.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:num_experts]
