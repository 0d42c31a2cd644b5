"""When the actions of a run began and ended.

A CPU has computed what its calls ask for when they return. On CUDA they return long before, so events on the stream
that computes mark the moments there. They are read when somebody asks, once the device has come to the last of them,
and set against the host's clock by an event of that moment.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwright.schedule.action import Action


@dataclass(frozen=True, slots=True)
class Performed:
    """An action that was carried out, and when (seconds of the host's clock, which all ranks of a machine share).

    A compute action may wait for its input first; from `began_s` on it computes. A send that left with its part of a
    pair began before the pair ended.
    """

    action: Action
    start_s: float
    began_s: float
    end_s: float


class ActionTimes(Protocol):
    """Takes down moments, in whatever form it likes."""

    def clear(self) -> None:
        """Forget all actions."""

    def now(self) -> Any:
        """The moment at which what was asked for so far is computed."""

    def add(self, action: Action, start: Any, began: Any, end: Any) -> None:
        """Another action, and its moments."""

    def performed(self) -> list[Performed]:
        """The actions so far. On CUDA the host waits for the device."""


class HostTimes(ActionTimes):
    """Moments of the host's clock."""

    def __init__(self) -> None:
        self._performed: list[Performed] = []

    def clear(self) -> None:
        """Forget all actions."""
        self._performed = []

    def now(self) -> float:
        """This moment."""
        return time.perf_counter()

    def add(self, action: Action, start: float, began: float, end: float) -> None:
        """Another action, and its moments."""
        self._performed.append(Performed(action, start, began, end))

    def performed(self) -> list[Performed]:
        """The actions so far."""
        return self._performed


class DeviceTimes(ActionTimes):
    """Moments at which the current stream of a device is through with what it was given."""

    def __init__(self) -> None:
        self._actions: list[tuple[Action, torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []
        self._performed: list[Performed] = []

    def clear(self) -> None:
        """Forget all actions."""
        self._actions, self._performed = [], []

    def now(self) -> torch.cuda.Event:
        """An event behind what was asked for so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(
        self, action: Action, start: torch.cuda.Event, began: torch.cuda.Event, end: torch.cuda.Event
    ) -> None:  # fmt: skip
        """Another action, and its moments."""
        self._actions.append((action, start, began, end))

    def performed(self) -> list[Performed]:
        """The actions so far, once all are over."""
        if self._actions:
            last = self.now()
            last.synchronize()
            last_s = time.perf_counter()
            self._performed += [
                Performed(action, *(last_s - event.elapsed_time(last) / 1e3 for event in events))
                for action, *events in self._actions
            ]
            self._actions = []
        return self._performed
