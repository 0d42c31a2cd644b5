"""The times at which the actions of a run began and ended.

On a CPU, work is done when its call returns. On CUDA calls return long before, so events on the compute stream mark the
moments. They are read when a caller asks for the times, once the device has reached the last event, and are related to
the host's clock by an event recorded at that moment.
"""

import time
from dataclasses import dataclass
from typing import Any

from shardwright.parallel.device_streams import DeviceStreams, TimedEvent, wait_on_host
from shardwright.schedule.action import Action


@dataclass(frozen=True, slots=True)
class Performed:
    """An executed action and its times (seconds of the host's clock, which all ranks of a machine share).

    A compute action may wait for its input first; from `began_s` on it computes. A send that was issued with its part
    of a pair began before the pair ended.
    """

    action: Action
    start_s: float
    began_s: float
    end_s: float


class ActionTimes:
    """Executed actions and their moments, on the host's clock."""

    def __init__(self) -> None:
        self._performed: list[Performed] = []

    def clear(self) -> None:
        """Forget all actions."""
        self._performed = []

    def now(self) -> Any:
        """The moment at which all work issued so far is done."""
        return time.perf_counter()

    def add(self, action: Action, start: Any, began: Any, end: Any) -> None:
        """Record an action and its moments."""
        self._performed.append(Performed(action, start, began, end))

    def performed(self) -> list[Performed]:
        """The actions so far. On CUDA the host waits for the device."""
        return self._performed


class DeviceTimes(ActionTimes):
    """Moments at which the current stream of a device has done its work."""

    def __init__(self, streams: DeviceStreams) -> None:
        super().__init__()
        self._streams = streams
        self._actions: list[tuple[Action, TimedEvent, TimedEvent, TimedEvent]] = []

    def clear(self) -> None:
        super().clear()
        self._actions = []

    def now(self) -> TimedEvent:
        event = self._streams.timed_event()
        event.record()
        return event

    def add(self, action: Action, start: TimedEvent, began: TimedEvent, end: TimedEvent) -> None:
        self._actions.append((action, start, began, end))

    def performed(self) -> list[Performed]:
        if self._actions:
            last = self.now()
            wait_on_host(self._streams, last)
            last_s = time.perf_counter()
            self._performed += [
                Performed(action, *(last_s - event.elapsed_time(last) / 1e3 for event in events))
                for action, *events in self._actions
            ]
            self._actions = []
        return self._performed
