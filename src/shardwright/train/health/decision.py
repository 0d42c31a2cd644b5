"""The decision about a step: update with it, leave it out, undo it, or end the run with it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Course(Enum):
    """How a run goes on after it has seen the loss and the gradient of a step. All but the first leave the update of
    the step out, where the schedule drains."""

    GO_ON = "go on"
    SKIP = "skip"
    REWIND = "rewind"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """A course, the same on every rank. `cause` is "not finite", "spike", "overflow", "no target" or empty where
    nothing is wrong; `sentence` is what to say of it, empty where nothing is to be said; `step` is which step of
    several it is on."""

    course: Course = Course.GO_ON
    cause: str = ""
    sentence: str = ""
    step: int = 0


ALL_IS_WELL = Decision()
# On a step none of whose tokens has a loss: there is nothing to learn from it, and nobody is asked.
WITHOUT_TARGET = Decision(Course.SKIP, "no target")

# Decides on a step, counted from 0, by its loss and the norm of its gradient, None where there is none.
Judge = Callable[[int, float, float | None], Decision]


def go_on(step: int, loss: float, norm: float | None) -> Decision:
    """The decision of nobody: every step is updated with."""
    return ALL_IS_WELL
