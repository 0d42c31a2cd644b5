"""Offloading of kept inputs of recomputed layers: they are in host memory between the forward and the backward.

Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857, section 5.1.2) do this with activation checkpoints: these are
small relative to the work between two of them, so the copies are hidden behind computation. In the backward the copy of
a layer's input begins when the backward of the next layer begins.

On CUDA the copies run on streams of their own, from and to pinned memory. On a CPU device and host share memory, but
the copies are real all the same: bytes and results are those of a device.
"""

import threading
from collections import defaultdict

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams, Event
from shardwright.parallel.pinned_memory import HostBuffer


class HostPool:
    """Reusable host buffers of one rank, and the account of the bytes that passed through them."""

    def __init__(self, device: torch.device, streams: DeviceStreams | None = None) -> None:
        """There are `streams` if the device has memory of its own."""
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
        """A host buffer for a tensor like `x`; without memory in a dry run."""
        self.allocated_bytes += x.nbytes
        if self.streams is not None:
            return HostBuffer(self.streams.pinned(tuple(x.shape), x.dtype))
        place = self.device if self.device.type == "meta" else None
        return HostBuffer(torch.empty(x.shape, dtype=x.dtype, device=place))

    def send(self, x: Tensor) -> tuple[HostBuffer, Event | None]:
        """Begin to copy `x` to the host. Returns its buffer, and on CUDA the event of the copy's end."""
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
            self.streams.lend(x, self._outward)  # x may be freed, but its memory is not reused before the copy is over
            copy_end: Event = self._outward.record_event()
        return buffer, copy_end

    def fetch(self, buffer: HostBuffer, send_end: Event | None) -> tuple[Tensor, Event | None]:
        """Begin to copy a buffer back, after `send_end`, the end of its copy to the host, and return it to the pool.
        Returns the tensor, and on CUDA the event of this copy's end."""
        size = buffer.tensor.numel() * buffer.tensor.element_size()
        copy_end: Event | None = None
        if self.streams is None or self._inward is None:
            x = buffer.tensor.clone()
        else:
            with self.streams.using(self._inward):
                if send_end is not None:
                    self._inward.wait_event(send_end)
                x = torch.empty(buffer.tensor.shape, dtype=buffer.tensor.dtype, device=self.device)
                x.copy_(buffer.tensor, non_blocking=True)
                copy_end = buffer.is_free = self._inward.record_event()
        with self._lock:
            self.bytes_in += size
            self.held_bytes -= size
            self._free[x.shape, x.dtype].append(buffer)
        return x, copy_end


class Convoy:
    """The kept inputs of one forward pass through a stage, in the order of its layers; they come back in reverse."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._on_host: list[tuple[HostBuffer, Event | None]] = []
        self._incoming: tuple[int, Tensor, Event | None] | None = None

    def send(self, x: Tensor) -> int:
        """Begin to copy `x` to the host. Returns its number."""
        self._on_host.append(self._pool.send(x))
        return len(self._on_host) - 1

    def bring(self, number: int) -> Tensor:
        """The tensor with this number, which must be the last one on the host. Begins to copy the one before it
        back."""
        if self._incoming is None:
            self._fetch_last()
        assert self._incoming is not None and self._incoming[0] == number, "a backward needs inputs in reverse order"
        _, x, copy_end = self._incoming
        self._incoming = None
        streams = self._pool.streams
        if streams is not None and copy_end is not None:
            compute_stream = streams.current()
            compute_stream.wait_event(copy_end)
            streams.lend(x, compute_stream)
        if self._on_host:
            self._fetch_last()
        return x

    def _fetch_last(self) -> None:
        self._incoming = (len(self._on_host) - 1, *self._pool.fetch(*self._on_host.pop()))
