"""The order of a device's work: streams, each of which does what it is told in that order; events, for which others
wait; and host memory that the device copies from and to by itself.

All that a rank issues beside the stream that computes goes by `DeviceStreams`. So a check may stand in its place, and
see which accesses to memory have an order (measure/checks/access_order.py). Collectives of torch have streams of their
own, and order these by themselves.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.parallel.pinned_memory import pinned_empty


class Event(Protocol):
    """A moment in a stream's work."""

    def synchronize(self) -> None:
        """Let the host wait until the stream has come so far."""


class Stream(Protocol):
    """Work that a device does in order."""

    def wait_stream(self, stream: Any) -> None:
        """Go on only after all that another stream was told so far."""

    def wait_event(self, event: Any) -> None:
        """Go on only after an event."""

    def record_event(self) -> Any:
        """An event behind all that was told so far."""


class DeviceStreams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """The one that this thread issues to."""

    def made(self) -> Stream:
        """A new one."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """While it lasts, this thread issues to a stream."""

    def lend(self, x: Tensor, stream: Any) -> None:
        """Memory of `x` may be let go, but is not used again before all that a stream was told so far is over."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to, with whatever lies there. It is kept until no copy from or to
        it is under way."""

    def sent(self, values: Tensor) -> tuple[Tensor, Event]:
        """Begin to copy values of the device to the host. Returns the copy, and when it is there; both may be let
        go."""

    def brought(self, values: Tensor) -> Tensor:
        """Begin to copy values of the host to the device, on the current stream. They may be let go."""

    def is_on_host(self, x: Tensor) -> bool:
        """True if `x` lies in host memory."""

    def host_reads(self, x: Tensor) -> None:
        """The host is about to read numbers: of the device, for which it waits, or of its own memory."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def made(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def lend(self, x: Tensor, stream: Any) -> None:
        x.record_stream(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pinned_empty(shape, dtype)

    # What may be let go lies in memory that torch itself pins: that is not handed out before the copies are over.

    def sent(self, values: Tensor) -> tuple[Tensor, Event]:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        return copy, self.current().record_event()

    def brought(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self._device, non_blocking=True)

    def is_on_host(self, x: Tensor) -> bool:
        return x.device.type == "cpu"

    def host_reads(self, x: Tensor) -> None: ...


def streams_of(device: torch.device) -> DeviceStreams | None:
    """The streams of a device; None of one that does at once what it is told."""
    return CudaStreams(device) if device.type == "cuda" else None
