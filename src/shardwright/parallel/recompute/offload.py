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

from shardwright.parallel.pinned_memory import HostBuffer, pinned_empty


class HostPool:
    """Host buffers of one rank, used again and again, and the account of what passed through them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_bytes = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[HostBuffer]] = defaultdict(list)
        self._lock = threading.Lock()  # a forward and a backward may run side by side
        on_cuda = device.type == "cuda"
        self._outward = torch.cuda.Stream(device) if on_cuda else None
        self._inward = torch.cuda.Stream(device) if on_cuda else None

    def _make(self, x: Tensor) -> HostBuffer:
        """Host memory for such a tensor; without memory in a dry run."""
        self.allocated_bytes += x.nbytes
        if self.device.type == "cuda":
            return HostBuffer(pinned_empty(tuple(x.shape), x.dtype))
        place = self.device if self.device.type == "meta" else None
        return HostBuffer(torch.empty(x.shape, dtype=x.dtype, device=place))

    def send(self, x: Tensor) -> tuple[HostBuffer, torch.cuda.Event | None]:
        """Begin to copy `x` out. Returns where to, and on CUDA when the copy is over."""
        x = x.detach()
        size = x.numel() * x.element_size()
        with self._lock:
            free = self._free[x.shape, x.dtype]
            buffer = free.pop() if free else self._make(x)
            self.bytes_out += size
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self._outward is None:
            buffer.tensor.copy_(x)
            return buffer, None
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            if buffer.is_free is not None:
                self._outward.wait_event(buffer.is_free)
            buffer.tensor.copy_(x, non_blocking=True)
            x.record_stream(self._outward)  # its memory may be let go, but not used again before the copy is over
            return buffer, self._outward.record_event()

    def fetch(self, buffer: HostBuffer, is_there: torch.cuda.Event | None) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to copy back, and give the buffer up. Returns the tensor, and on CUDA when it may be used."""
        size = buffer.tensor.numel() * buffer.tensor.element_size()
        if self._inward is None:
            x, arrived = buffer.tensor.clone(), None
        else:
            with torch.cuda.stream(self._inward):
                if is_there is not None:
                    self._inward.wait_event(is_there)
                x = torch.empty_like(buffer.tensor, device=self.device)
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
        self._away: list[tuple[HostBuffer, torch.cuda.Event | None]] = []
        self._coming: tuple[int, Tensor, torch.cuda.Event | None] | None = None

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
        if arrived is not None:
            here = torch.cuda.current_stream(self._pool.device)
            here.wait_event(arrived)
            x.record_stream(here)
        if self._away:
            self._call()
        return x

    def _call(self) -> None:
        self._coming = (len(self._away) - 1, *self._pool.fetch(*self._away.pop()))
