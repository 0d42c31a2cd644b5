"""Copies between a device and host memory, each direction on a stream of its own, so that both overlap with each other
and with computation.

CUDA cannot copy and change the number type at once: torch would convert on the CPU, into memory that is not pinned, and
wait for all of it. Here the CPU converts one block into pinned memory while the block before it is copied.
"""

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams, Event, wait_on_host
from shardwright.parallel.pinned_memory import HostBuffer

_BLOCK_BYTES = 32 << 20  # takes a link a millisecond; at most two blocks are kept


class HostLink:
    """The link between a device and the host, which all shards on the device use."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._outward, self._inward = streams.made(), streams.made()
        self._blocks: list[HostBuffer] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory."""
        return self._streams.pinned(shape, dtype)

    def is_on_host(self, x: Tensor) -> bool:
        """True if `x` lies in host memory."""
        return self._streams.is_on_host(x)

    def send(self, out: Tensor, values: Tensor) -> Event:
        """Begin to copy values of the device to `out`, pinned memory of the host. Returns the event of the copy's end;
        until then neither tensor may be written to."""
        self._outward.wait_stream(self._streams.current())
        with self._streams.using(self._outward):
            out.copy_(values, non_blocking=True)
            copy_end: Event = self._outward.record_event()
        return copy_end

    def wait_for(self, copy_end: Event) -> None:
        """Let the host wait for the end of a copy."""
        wait_on_host(self._streams, copy_end)

    def bring(self, out: Tensor, values: Tensor) -> None:
        """Copy values of the host, in pinned memory, to `out`, memory of the device. Work that is issued later sees
        them. If the copy rounds the values, they may be overwritten at once."""
        compute_stream = self._streams.current()
        self._inward.wait_stream(compute_stream)
        if out.dtype == values.dtype:
            with self._streams.using(self._inward):
                out.copy_(values, non_blocking=True)
        else:
            block_size = _BLOCK_BYTES // out.element_size()
            for out_part, values_part in zip(out.split(block_size), values.split(block_size), strict=True):
                self._bring_rounded(out_part, values_part)
        compute_stream.wait_stream(self._inward)

    def _bring_rounded(self, out: Tensor, values: Tensor) -> None:
        block = self._next_block()
        staged = block.tensor.view(out.dtype)[: len(out)]
        staged.copy_(values)
        with self._streams.using(self._inward):
            out.copy_(staged, non_blocking=True)
            block.is_free = self._inward.record_event()

    def _next_block(self) -> HostBuffer:
        """The block that was used longest ago, once its copy is over."""
        if len(self._blocks) < 2:
            self._blocks.append(HostBuffer(self._streams.pinned((_BLOCK_BYTES,), torch.uint8)))
            return self._blocks[-1]
        self._blocks.reverse()
        block = self._blocks[-1]
        if block.is_free is not None:
            self.wait_for(block.is_free)
        return block
