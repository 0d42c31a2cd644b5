"""Seconds of a device's work: many calls between two of its own events, without a wait for the device between them.

A call that is launched and waited for takes 20 to 30 us whatever it computes, as long as a product of 20 GFLOP on a
large device. So before a round the device sleeps while the host launches all of it, and so the host's gaps are not
measured either.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardwright.config.units import MIB

CALLS = 20  # of each pass, between two events
COLD_BYTES = 256 * MIB  # several times as much as any device's caches hold
_AWAKE_AFTER = 1.5  # ratio of the device's sleep to the host's time to launch the previous round
_CYCLES_PER_S = 2e9  # at least the clock rate of any device
_MOST_CYCLES = 400_000_000


class DeviceClock:
    """A clock of moments in the queue of CUDA's current device."""

    def mark(self) -> Any:
        """A moment after all work launched so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one mark to another; waits until the latter is past."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def sleep(self, seconds: float) -> None:
        """Keep the device idle for about `seconds` seconds: launch a kernel that counts cycles."""
        if (cycles := min(_MOST_CYCLES, int(_CYCLES_PER_S * seconds))) > 0:
            torch.cuda._sleep(cycles)


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a device that has a queue; None for a CPU, which is timed call by call."""
    return DeviceClock() if device.type == "cuda" else None


def rounds_call(clock: DeviceClock, passes: Sequence[Callable[[int], object]]) -> Callable[[], tuple[float, ...]]:
    """A function that times a round: mean seconds of each pass, which is called with 0, 1, 2 and so on."""
    host_s = 0.0  # of the previous round, from its first launch to its last

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
        return tuple(clock.seconds(begin, end) / CALLS for begin, end in pairwise(marks))

    return call
