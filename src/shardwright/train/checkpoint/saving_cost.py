"""The cost of a checkpoint for a run that goes on meanwhile: its waits, and the slowdown of its steps.

The copy that a run waits for may be the smaller part: writing takes processors, and a disk or a network that the data
come from. So the time between the ends of steps is held against that of steps that nothing is written in.
"""

import statistics
from collections import deque

# Steps without a checkpoint that are remembered, and how many tell what one takes; the first ones of a run don't.
_MOST_PLAIN, _LEAST_PLAIN, _COLD = 20, 3, 2
_MOST_SAVES = 5


class SavingCost:
    """Learns from each end of a step what a checkpoint costs."""

    def __init__(self) -> None:
        self._plain_s: deque[float] = deque(maxlen=_MOST_PLAIN)
        self._costs_s: deque[float] = deque(maxlen=_MOST_SAVES)
        self._num_seen = 0
        self._last_s: float | None = None
        # Of the steps since a checkpoint was begun: how many, and how long they took.
        self._num_saving, self._saving_s = 0, 0.0

    def step_ends(self, now_s: float, was_saving: bool) -> None:
        """A step has ended; something was being written, or was begun, since the one before where it `was_saving`."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        self._num_seen += 1
        if was_saving:
            self._num_saving += 1
            self._saving_s += now_s - last_s
            return
        if self._num_saving and len(self._plain_s) >= _LEAST_PLAIN:
            self._costs_s.append(max(0.0, self._saving_s - self._num_saving * statistics.median(self._plain_s)))
        self._num_saving, self._saving_s = 0, 0.0
        if self._num_seen > _COLD:
            self._plain_s.append(now_s - last_s)

    def knows_steps(self) -> bool:
        """True if steps without a checkpoint are known, so that one can be held against them."""
        return len(self._plain_s) >= _LEAST_PLAIN

    def seconds(self) -> float | None:
        """The cost of one checkpoint; None before the first was measured."""
        return statistics.median(self._costs_s) if self._costs_s else None
