"""Seconds of a device's work: many calls between two of its own events, and no waiting for it within them.

A call that is launched and waited for takes 20 to 30 us whatever it computes, as long as a product of 20 GFLOP on a
large device. So before a round the device is kept asleep while the host launches all of it, and gaps of the host are
not in what is measured either.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from shardwright.config.units import MIB

CALLS = 20  # of each pass, between two events
COLD_BYTES = 256 * MIB  # what no cache of a device holds, several times over
_AWAKE_AFTER = 1.5  # times as long as the host took to launch the round before
_CYCLES_PER_S = 2e9  # no device's clock is faster
_MOST_CYCLES = 400_000_000


class DeviceClock(Protocol):
    """Moments in a device's queue."""

    def mark(self) -> Any:
        """A moment behind all that was launched."""

    def seconds(self, first: Any, last: Any) -> float:
        """From one mark to another, waiting until it is past."""

    def sleep(self, seconds: float) -> None:
        """Keep the device busy with nothing, about so long."""


@dataclass(frozen=True)
class EventClock:
    """The clock of CUDA's current device."""

    def mark(self) -> Any:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Between two events."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def sleep(self, seconds: float) -> None:
        """A kernel that counts cycles."""
        if (cycles := min(_MOST_CYCLES, int(_CYCLES_PER_S * seconds))) > 0:
            torch.cuda._sleep(cycles)


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a device that has a queue; a CPU has none, and is timed call by call."""
    return EventClock() if device.type == "cuda" else None


def rounds_call(clock: DeviceClock, passes: Sequence[Callable[[int], object]]) -> Callable[[], tuple[float, ...]]:
    """A function that times a round: mean seconds of each pass, which is called with 0, 1, 2 and so on."""
    host_s = 0.0  # of the last round, from its first launch to its last

    def call() -> tuple[float, ...]:
        nonlocal host_s
        clock.sleep(_AWAKE_AFTER * host_s)
        start_s = time.perf_counter()
        marks = [clock.mark()]
        for work in passes:
            for number in range(CALLS):
                work(number)
            marks.append(clock.mark())
        host_s = time.perf_counter() - start_s
        return tuple(clock.seconds(first, last) / CALLS for first, last in pairwise(marks))

    return call
