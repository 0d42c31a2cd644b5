"""How often each expert is named, and how the host learns of it: without a word, or with one word while it works on."""

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams, Event, streams_of


class HostNumbers:
    """Whole numbers of a device on their way to the host, which may launch other work until it reads them."""

    def __init__(self, values_N: Tensor, streams: DeviceStreams | None = None) -> None:
        """`streams` are those of the tensor's device, if it is not said."""
        self._streams = streams = streams or streams_of(values_N.device)
        self._values_N = values_N
        self._there: Event | None = None
        self._numbers: list[int] | None = None
        if streams is not None:
            self._values_N, self._there = streams.sent(values_N)

    def read(self, dry: list[int] | None = None) -> list[int]:
        """The numbers; those of a `dry` run, in which they have no values. Blocks until they are there, and no longer:
        what was launched since goes on."""
        if self._numbers is None:
            if self._there is not None:
                self._there.synchronize()
            if self._streams is not None:
                self._streams.host_reads(self._values_N)
            self._numbers = [int(value) for value in self._values_N.tolist()] if dry is None else dry
        return self._numbers


def count_each(experts: Tensor, num_experts: int) -> Tensor:
    """How often each of so many experts stands in a tensor of any shape, [E], int64; E itself stands for none.

    torch.bincount would do, but for CUDA, where the host waits to learn how large its result is.
    """
    numbers = experts.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:num_experts]
