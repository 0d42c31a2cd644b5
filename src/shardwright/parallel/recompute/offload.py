"""Kept inputs of recomputed layers, in host memory between the forward and the backward.

Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857, section 5.1.2) do this with activation checkpoints: they are
small against the work between two of them, so the link to the host can carry them while the device computes. On the way
back a layer's input is asked for when the backward begins with the layer after it.

On CUDA the copies run on streams of their own, from and to pinned memory. On a CPU device and host are one memory, and
the copies are real all the same: what is counted and computed is what a device would see.
"""

import threading
from collections import defaultdict

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams, Event
from shardwright.parallel.pinned_memory import HostBuffer


class HostPool:
    """Host buffers of one rank, used again and again, and the account of what passed through them."""

    def __init__(self, device: torch.device, streams: DeviceStreams | None = None) -> None:
        """There are `streams` where the device has memory of its own."""
        self.device, self.streams = device, streams
        self.allocated_bytes = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[HostBuffer]] = defaultdict(list)
        self._lock = threading.Lock()  # a forward and a backward may run side by side
        self._outward = streams.made() if streams else None
        self._inward = streams.made() if streams else None

    def _make(self, x: Tensor) -> HostBuffer:
        """Host memory for such a tensor; without memory in a dry run."""
        self.allocated_bytes += x.nbytes
        if self.streams is not None:
            return HostBuffer(self.streams.pinned(tuple(x.shape), x.dtype))
        place = self.device if self.device.type == "meta" else None
        return HostBuffer(torch.empty(x.shape, dtype=x.dtype, device=place))

    def send(self, x: Tensor) -> tuple[HostBuffer, Event | None]:
        """Begin to copy `x` out. Returns where to, and on CUDA when the copy is over."""
        x = x.detach()
        size = x.numel() * x.element_size()
        with self._lock:
            free = self._free[x.shape, x.dtype]
            buffer = free.pop() if free else self._make(x)
            self.bytes_out += size
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self.streams is None or self._outward is None:
            buffer.tensor.copy_(x)
            return buffer, None
        self._outward.wait_stream(self.streams.current())
        with self.streams.using(self._outward):
            if buffer.is_free is not None:
                self._outward.wait_event(buffer.is_free)
            buffer.tensor.copy_(x, non_blocking=True)
            self.streams.lend(x, self._outward)  # its memory may be let go, but not used again before the copy is over
            sent: Event = self._outward.record_event()
        return buffer, sent

    def fetch(self, buffer: HostBuffer, is_there: Event | None) -> tuple[Tensor, Event | None]:
        """Begin to copy back, and give the buffer up. Returns the tensor, and on CUDA when it may be used."""
        size = buffer.tensor.numel() * buffer.tensor.element_size()
        arrived: Event | None = None
        if self.streams is None or self._inward is None:
            x = buffer.tensor.clone()
        else:
            with self.streams.using(self._inward):
                if is_there is not None:
                    self._inward.wait_event(is_there)
                x = torch.empty(buffer.tensor.shape, dtype=buffer.tensor.dtype, device=self.device)
                x.copy_(buffer.tensor, non_blocking=True)
                arrived = buffer.is_free = self._inward.record_event()
        with self._lock:
            self.bytes_in += size
            self.held_bytes -= size
            self._free[x.shape, x.dtype].append(buffer)
        return x, arrived


class Convoy:
    """The kept inputs of one forward pass through a stage, in the order of its layers; they come back in reverse."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._away: list[tuple[HostBuffer, Event | None]] = []
        self._coming: tuple[int, Tensor, Event | None] | None = None

    def send(self, x: Tensor) -> int:
        """Take `x` to the host. Returns its number."""
        self._away.append(self._pool.send(x))
        return len(self._away) - 1

    def bring(self, number: int) -> Tensor:
        """The tensor with this number, which must be the last that is away; the one before it sets out."""
        if self._coming is None:
            self._call()
        assert self._coming is not None and self._coming[0] == number, "a backward needs inputs in reverse order"
        _, x, arrived = self._coming
        self._coming = None
        streams = self._pool.streams
        if streams is not None and arrived is not None:
            here = streams.current()
            here.wait_event(arrived)
            streams.lend(x, here)
        if self._away:
            self._call()
        return x

    def _call(self) -> None:
        self._coming = (len(self._away) - 1, *self._pool.fetch(*self._away.pop()))
