"""The band in which the loss is expected, from its own past. A loss above the band is a spike.

The band follows from the median of the last losses, and from their median absolute deviation times 1.4826, which is the
standard deviation if losses are normally distributed (Hampel 1974, J. Am. Stat. Assoc. 69). A few outliers change
neither, so that one spike does not hide the next.

Two cases could cause false alarms. The deviation of a nearly constant loss is close to 0: so the band uses at least a
share of the median instead. And while the loss falls, at the beginning of a run, the window has higher losses: they
only widen the band and raise its median, which is harmless, because only losses above the band are detected.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

TO_NORMAL = 1.4826  # standard deviation over median absolute deviation
LEAST_DEVIATION = 0.005  # as a share of the median
LEAST_LOSSES = 8  # losses that the band needs


class LossBand:
    """The last finite losses, and the band that follows from them."""

    def __init__(self, window: int, deviations: float) -> None:
        self._past: deque[float] = deque(maxlen=window)
        self._deviations = deviations

    @property
    def top(self) -> float:
        """The highest loss that is not a spike; infinite until LEAST_LOSSES are known."""
        if len(self._past) < LEAST_LOSSES:
            return math.inf
        middle = median(self._past)
        deviation = TO_NORMAL * median(abs(loss - middle) for loss in self._past)
        return middle + self._deviations * max(deviation, LEAST_DEVIATION * abs(middle))

    @property
    def middle(self) -> float:
        """The median of the last losses; nan if there are none."""
        return median(self._past) if self._past else math.nan

    def is_above(self, loss: float) -> bool:
        """True if a finite loss is a spike."""
        return loss > self.top

    def add(self, loss: float) -> None:
        """Add a loss to the window, if it is finite. Spikes are added, too: a loss that stays as high becomes the new
        median after half a window."""
        if math.isfinite(loss):
            self._past.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"past": list(self._past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint. If its window was longer, only its newest losses are kept."""
        self._past = deque((float(loss) for loss in state["past"]), maxlen=self._past.maxlen)
