"""Copies between a device and host memory, each way on a stream of its own, so that both run beside each other and
beside what is computed.

A copy that changes the number type is no copy to CUDA: torch would convert on the CPU, into memory that is not pinned,
and wait for all of it. Here the CPU converts some of it into pinned memory while the part before is on its way.
"""

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams, Event
from shardwright.parallel.pinned_memory import HostBuffer

_BLOCK_BYTES = 32 << 20  # a millisecond of a link, and two of them are all that is kept


class HostLink:
    """The way between a device and the host, of which all shards on the device make use."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._outward, self._inward = streams.made(), streams.made()
        self._blocks: list[HostBuffer] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory with whatever lies there."""
        return self._streams.pinned(shape, dtype)

    def is_on_host(self, x: Tensor) -> bool:
        """True if `x` lies in host memory."""
        return self._streams.is_on_host(x)

    def send(self, into: Tensor, values: Tensor) -> Event:
        """Begin to copy values of the device into pinned memory of the host. Returns when that is over; until then
        neither may be written to."""
        self._outward.wait_stream(self._streams.current())
        with self._streams.using(self._outward):
            into.copy_(values, non_blocking=True)
            sent: Event = self._outward.record_event()
        return sent

    def bring(self, into: Tensor, values: Tensor) -> None:
        """Copy values of the host, in pinned memory, into memory of the device. What is computed from here on has them;
        where they are rounded on the way they may be written to at once."""
        here = self._streams.current()
        self._inward.wait_stream(here)
        if into.dtype == values.dtype:
            with self._streams.using(self._inward):
                into.copy_(values, non_blocking=True)
        else:
            num = _BLOCK_BYTES // into.element_size()
            for part, rounded in zip(into.split(num), values.split(num), strict=True):
                self._bring_rounded(part, rounded)
        here.wait_stream(self._inward)

    def _bring_rounded(self, into: Tensor, values: Tensor) -> None:
        block = self._next_block()
        staged = block.tensor.view(into.dtype)[: len(into)]
        staged.copy_(values)
        with self._streams.using(self._inward):
            into.copy_(staged, non_blocking=True)
            block.is_free = self._inward.record_event()

    def _next_block(self) -> HostBuffer:
        """The block that has waited longest, once its copy is over."""
        if len(self._blocks) < 2:
            self._blocks.append(HostBuffer(self._streams.pinned((_BLOCK_BYTES,), torch.uint8)))
            return self._blocks[-1]
        self._blocks.reverse()
        block = self._blocks[-1]
        if block.is_free is not None:
            block.is_free.synchronize()
        return block
