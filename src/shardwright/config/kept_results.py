"""A cache for functions of one frozen object."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def kept_by_identity(function: Callable[[Argument], Result], most: int = 64) -> Callable[[Argument], Result]:
    """Cache a function's results for the `most` last objects. An object equals only itself, because comparing all
    fields of two objects would take longer than most functions."""
    cached = lru_cache(maxsize=most)(lambda key: function(key.subject))

    @wraps(function)
    def cached_function(subject: Argument) -> Result:
        return cached(_IdentityKey(subject))

    return cached_function


class _IdentityKey:
    """A cache key that compares an object by its identity. The key keeps the object alive, so its identity stays
    unique."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.subject is other.subject

    def __hash__(self) -> int:
        return id(self.subject)
