"""Results of functions of one frozen object, which are kept."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def kept_by_identity(function: Callable[[Given], Made]) -> Callable[[Given], Made]:
    """A function whose results for the last objects it was asked of are kept. An object equals itself alone: to compare
    all fields of two would take longer than most functions."""
    kept = lru_cache(maxsize=64)(lambda same: function(same.one))

    @wraps(function)
    def asked(one: Given) -> Made:
        return kept(_Same(one))

    return asked


class _Same:
    """An object as a key, by its identity. It stays alive as long as the key, so no other one gets its identity."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.one is other.one

    def __hash__(self) -> int:
        return id(self.one)
