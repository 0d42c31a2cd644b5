"""The cost of a checkpoint for a run that trains meanwhile: the waits, and the slowdown of its steps.

The blocking copy may be the smaller part: a background write competes for processors, and for the disk or network that
the data come from. So the durations of steps with a save in progress are compared with those of steps without one.
"""

import statistics
from collections import deque

# Steps without a save: how many are remembered, how many are needed for a median, and how many first steps of a run,
# which are slower, are left out.
_MOST_PLAIN, _LEAST_PLAIN, _COLD = 20, 3, 2
_MOST_SAVES = 5


class SavingCost:
    """Measures the cost of a checkpoint from the times at which steps end."""

    def __init__(self) -> None:
        self._plain_s: deque[float] = deque(maxlen=_MOST_PLAIN)
        self._costs_s: deque[float] = deque(maxlen=_MOST_SAVES)
        self._num_seen = 0
        self._last_s: float | None = None
        # Steps since a save began: their number, and their total time.
        self._num_saving, self._saving_s = 0, 0.0

    def step_ends(self, now_s: float, was_saving: bool) -> None:
        """Note that a step has ended. `was_saving`: a save began or was in progress since the step before."""
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
        """True if enough steps without a save are known to compare others with."""
        return len(self._plain_s) >= _LEAST_PLAIN

    def seconds(self) -> float | None:
        """The cost of one checkpoint in seconds; None before one is measured."""
        return statistics.median(self._costs_s) if self._costs_s else None
