"""Arithmetic that holds for a number and, element by element, for an array of numbers, without numpy.

Files on the ground describe what a search asks of thousands of plans at once, and whoever draws one plan has no numpy.
Arrays are numpy's: they bring `clip` along.
"""

from typing import Any


class MixedError(Exception):
    """A condition that decides what is computed holds of some elements alone: of which, `condition` says."""

    def __init__(self, condition: Any) -> None:
        super().__init__("a condition holds of some elements of an array alone")
        self.condition = condition


def holds(condition: Any) -> bool:
    """True if a condition holds, of a number or of all elements of an array. MixedError where it holds of some alone:
    who has asked for all of them asks for either part by itself."""
    if not hasattr(condition, "all"):
        return bool(condition)
    if (is_so := bool(condition.all())) or not condition.any():
        return is_so
    raise MixedError(condition)


def least(first: Any, second: Any) -> Any:
    """The smaller of two, of each pair of elements."""
    if hasattr(first, "clip"):
        return first.clip(max=second)
    return second.clip(max=first) if hasattr(second, "clip") else min(first, second)


def most(first: Any, *others: Any) -> Any:
    """The largest of some, of each pair of elements."""
    for other in others:
        if hasattr(first, "clip"):
            first = first.clip(min=other)
        else:
            first = other.clip(min=first) if hasattr(other, "clip") else max(first, other)
    return first


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """`then` where the condition holds, else the other; both are finite."""
    is_so = condition * 1
    return is_so * then + (1 - is_so) * otherwise
