"""A band that the loss is expected in, from its own past: what leaves it upwards is a spike.

The median of the last losses and their median absolute deviation from it, times 1.4826, which makes it the standard
deviation where losses are normal (Hampel 1974, J. Am. Stat. Assoc. 69). Neither is moved by a few outliers, so that one
spike does not hide the next.

Two things would else alarm for nothing. A loss that hardly moves has a deviation of nearly 0: it is never taken for
less than a share of the median. And while the loss falls, at the beginning, the window holds losses of another height:
they only make the band wider and its median higher, for a loss above them all is what is looked for.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

TO_NORMAL = 1.4826  # of a median absolute deviation
LEAST_DEVIATION = 0.005  # as a share of the median
LEAST_LOSSES = 8  # before there is a verdict


class LossBand:
    """The last finite losses, and whether the next one is above their band."""

    def __init__(self, window: int, deviations: float) -> None:
        self._past: deque[float] = deque(maxlen=window)
        self._deviations = deviations

    @property
    def top(self) -> float:
        """The highest loss that is no spike; infinite until enough losses were seen."""
        if len(self._past) < LEAST_LOSSES:
            return math.inf
        middle = median(self._past)
        deviation = TO_NORMAL * median(abs(loss - middle) for loss in self._past)
        return middle + self._deviations * max(deviation, LEAST_DEVIATION * abs(middle))

    @property
    def middle(self) -> float:
        """The median of the last losses; nan where there are none."""
        return median(self._past) if self._past else math.nan

    def is_above(self, loss: float) -> bool:
        """True if a finite loss is a spike."""
        return loss > self.top

    def add(self, loss: float) -> None:
        """Remember a loss, if it is finite. A spike is remembered too: a loss that stays there is the new height after
        half a window."""
        if math.isfinite(loss):
            self._past.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"past": list(self._past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; from one with a longer window, with its newest losses."""
        self._past = deque((float(loss) for loss in state["past"]), maxlen=self._past.maxlen)
