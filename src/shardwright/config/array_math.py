"""Arithmetic for a number or, element by element, for an array of numbers, without importing numpy.

Formulas in config and schedule are evaluated for thousands of plans at once in a search, and for one plan in programs
without numpy. Arrays are numpy arrays, which have the method `clip`.
"""

from typing import Any


class MixedError(Exception):
    """A condition that decides what is computed holds only for some elements of an array; `condition` is its array."""

    def __init__(self, condition: Any) -> None:
        super().__init__("a condition holds of some elements of an array alone")
        self.condition = condition


def holds(condition: Any) -> bool:
    """True if a condition holds for a number, or for all elements of an array. MixedError if it holds only for some:
    the caller then repeats its question for each of the two parts."""
    if not hasattr(condition, "all"):
        return bool(condition)
    if (is_so := bool(condition.all())) or not condition.any():
        return is_so
    raise MixedError(condition)


def least(first: Any, second: Any) -> Any:
    """The smaller of two numbers, element by element."""
    if hasattr(first, "clip"):
        return first.clip(max=second)
    return second.clip(max=first) if hasattr(second, "clip") else min(first, second)


def most(first: Any, *others: Any) -> Any:
    """The largest of some numbers, element by element."""
    largest = first
    for value in others:
        if hasattr(largest, "clip"):
            largest = largest.clip(min=value)
        else:
            largest = value.clip(min=largest) if hasattr(value, "clip") else max(largest, value)
    return largest


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """Select `then` if the condition holds, else `otherwise`, element by element; both must be finite."""
    is_so = condition * 1
    return is_so * then + (1 - is_so) * otherwise
