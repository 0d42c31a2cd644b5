"""The times at which the actions of a run began and ended.

On a CPU, work is done when its call returns. On CUDA calls return long before, so events on the compute stream mark the
moments. They are read when a caller asks for the times, once the device has reached the last event, and are related to
the host's clock by an event recorded at that moment.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.parallel.device_streams import DeviceStreams, TimedEvent, wait_on_host
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.timing import Times


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


def times_of_step(rows: Sequence[Sequence[Performed]]) -> Times:
    """A step as it was executed, in the form of the simulation: `rows` are the actions of each pipeline rank, and times
    count from the first action's start."""
    first_s = min(row[0].start_s for row in rows)
    consumed_s = {
        (part.kind, part.stage, part.microbatch): entry.began_s
        for row in rows
        for entry in row
        for part in entry.action.computes()
    }
    spans = [[_span(entry, consumed_s) for entry in row] for row in rows]
    starts, ends = ([[span[side] - first_s for span in row] for row in spans] for side in (0, 1))
    return Times(tuple(tuple(entry.action for entry in row) for row in rows), starts, ends)


def _span(entry: Performed, consumed_s: Mapping[tuple[Kind, int, int], float]) -> tuple[float, float]:
    """Start and end of an action. A receive counts as over when its consumer begins: nothing reads it before."""
    action = entry.action
    if action.kind is Kind.RECV_FORWARD:
        arrived_s = consumed_s[Kind.FORWARD, action.stage, action.microbatch]
    elif action.kind is Kind.RECV_BACKWARD:
        keys = [(kind, action.stage, action.microbatch) for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)]
        arrived_s = next(consumed_s[key] for key in keys if key in consumed_s)
    else:
        return entry.began_s, entry.end_s
    return arrived_s, arrived_s
