"""The decision about a step: update the weights, skip the update, undo the step by a rewind, or stop the run."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Course(Enum):
    """How a run goes on after the loss and the gradient of a step are known. If the schedule drains, all courses but
    GO_ON skip the update of the step."""

    GO_ON = "go on"
    SKIP = "skip"
    REWIND = "rewind"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """A course, the same on every rank. `cause` is "not finite", "spike", "overflow", "no target", or "" if nothing is
    wrong; `sentence` is for the user, or ""; `step` is the number of the step that it is about."""

    course: Course = Course.GO_ON
    cause: str = ""
    sentence: str = ""
    step: int = 0


ALL_IS_WELL = Decision()
# For a step without a loss on any token: the weights can't be updated, and the judge is not asked.
WITHOUT_TARGET = Decision(Course.SKIP, "no target")

# A function that decides on a step, counted from 0, by its loss and its gradient norm, None if there is no norm.
Judge = Callable[[int, float, float | None], Decision]


def go_on(step: int, loss: float, norm: float | None) -> Decision:
    """A judge that lets every step update the weights."""
    return ALL_IS_WELL
