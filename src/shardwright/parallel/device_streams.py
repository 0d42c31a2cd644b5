"""The order of a device's work: streams, which execute their work in the order of issue; events, for which other
streams wait; and host memory that the device can copy from and to asynchronously.

A rank uses streams other than the compute stream only through `DeviceStreams`. So a check may replace them, and see
which accesses to memory are ordered (measure/checks/access_order.py). torch's collectives have streams of their own,
and order these themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.parallel.pinned_memory import pinned_empty


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Let the host wait until the stream has reached this point."""


class TimedEvent(Protocol):
    """A point in a stream's work whose time is known once it is reached. It may be recorded again and again."""

    def record(self) -> None:
        """Put the event behind all work that this thread has issued so far to its current stream."""

    def query(self) -> bool:
        """True if the stream has reached this point."""

    def synchronize(self) -> None:
        """Let the host wait until the stream has reached this point."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one, both of which were reached."""


class Stream(Protocol):
    """Work that a device executes in order."""

    def wait_stream(self, stream: Any) -> None:
        """Order further work after all work that was issued to another stream so far."""

    def wait_event(self, event: Any) -> None:
        """Order further work after an event."""

    def record_event(self) -> Any:
        """An event after all work that was issued so far."""


class DeviceStreams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """The stream to which this thread issues work."""

    def made(self) -> Stream:
        """A new stream."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """A block in which this thread issues work to a stream."""

    def timed_event(self) -> TimedEvent:
        """A new event that measures time."""

    def lend(self, x: Tensor, stream: Any) -> None:
        """Allow `x` to be freed early: its memory is not reused before all work issued to a stream so far is over."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that the device can copy from and to. The caller keeps it until no copy from or to
        it is under way."""

    def sent(self, values: Tensor) -> tuple[Tensor, Event]:
        """Begin to copy values of the device to the host. Returns the copy, and the event of its end. The caller may
        free both at any time."""

    def brought(self, values: Tensor) -> Tensor:
        """Begin to copy values of the host to the device, on the current stream. The caller may free the values."""

    def is_on_host(self, x: Tensor) -> bool:
        """True if `x` lies in host memory."""

    def host_reads(self, x: Tensor) -> AbstractContextManager[None]:
        """A block in which the host reads numbers of `x`, from the device, for which it waits, or from its own
        memory."""

    def host_waits(self) -> AbstractContextManager[None]:
        """A block in which the host waits for the device, and so for other ranks, as a watch may need to know."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(
        self, device: torch.device, watched_wait: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`watched_wait` makes a block that tells a watch of a wait of the host."""
        self._device = device
        self._watched_wait = watched_wait

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def made(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def timed_event(self) -> TimedEvent:
        return torch.cuda.Event(enable_timing=True)

    def lend(self, x: Tensor, stream: Any) -> None:
        x.record_stream(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pinned_empty(shape, dtype)

    # Tensors that may be freed early lie in memory that torch itself pins: torch reuses it only after the copies.

    def sent(self, values: Tensor) -> tuple[Tensor, Event]:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        return copy, self.current().record_event()

    def brought(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self._device, non_blocking=True)

    def is_on_host(self, x: Tensor) -> bool:
        return x.device.type == "cpu"

    def host_reads(self, x: Tensor) -> AbstractContextManager[None]:
        return self._watched_wait()

    def host_waits(self) -> AbstractContextManager[None]:
        return self._watched_wait()


def streams_of(
    device: torch.device, watched_wait: Callable[[], AbstractContextManager[None]] = nullcontext
) -> DeviceStreams | None:
    """The streams of a device, whose waits of the host are each in a block of `watched_wait`; None if the device
    executes work at once, as a CPU does."""
    return CudaStreams(device, watched_wait) if device.type == "cuda" else None


def host_reading(streams: DeviceStreams | None, x: Tensor) -> AbstractContextManager[None]:
    """A block in which the host reads numbers of `x`, watched if a device has streams. Every read of the host from the
    device is in one, so that a hang there is named."""
    return nullcontext() if streams is None else streams.host_reads(x)


def wait_on_host(streams: DeviceStreams, event: Event | TimedEvent) -> None:
    """Let the host wait for an event, and be watched meanwhile."""
    with streams.host_waits():
        event.synchronize()


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
            if self._copy_end is not None and self._streams is not None:
                wait_on_host(self._streams, self._copy_end)
            with host_reading(self._streams, self._values_N):
                self._numbers = [int(value) for value in self._values_N.tolist()] if dry is None else dry
        return self._numbers
