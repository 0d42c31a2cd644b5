"""Values of expressions of a Python file, as far as they are known without running it.

Constants, lists and dictionaries stand for themselves. The result of a call is a ParsedCall; a name that the files do
not define is a Named; an unknown value is an Unread with its line, so that a value without effect may stay unknown.
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say

_MOST_ITEMS, _MOST_NUMBER = 10_000, 1 << 63


@dataclass(frozen=True)
class Named:
    """A name that the files do not define, such as a class or a member of an enumeration."""

    text: str

    @property
    def last(self) -> str:
        """The part behind the last dot."""
        return self.text.rpartition(".")[2]


@dataclass
class ParsedCall:
    """A call, which stands for its result: the called name (`callee`), its keyword arguments (`keywords`), and its
    positional arguments. An attribute that is assigned later is added to `keywords`."""

    callee: str
    keywords: dict[str, Any] = field(default_factory=dict)
    positional: list[Any] = field(default_factory=list)

    @property
    def short_callee(self) -> str:
        """The called name without its module: "FullAC.Config" of "ac.FullAC.Config"."""
        parts = self.callee.split(".")
        return ".".join(parts[-2:] if parts[-1] == "Config" else parts[-1:])

    @property
    def is_of_class(self) -> bool:
        """True if the called name looks like a class."""
        return self.callee.rpartition(".")[2].lstrip("_")[:1].isupper()


@dataclass(frozen=True)
class Unread:
    """An unknown value: the text of its expression, and its place (file and line)."""

    text: str
    place: str


_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
# Built-in functions that are followed for plain values.
_BUILTINS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "max": max,
    "min": min,
    "abs": abs,
    "round": round,
    "list": list,
    "tuple": list,
    "dict": dict,
}


def is_plain(value: Any) -> bool:
    """True if a value is a constant, or a list or dictionary of at most 10,000 constants."""
    if isinstance(value, list):
        return len(value) <= _MOST_ITEMS and all(is_constant(item) for item in value)
    if isinstance(value, dict):
        return len(value) <= _MOST_ITEMS and all(is_constant(item) for item in value.values())
    return is_constant(value)


def is_constant(value: Any) -> bool:
    """True if a value is a number, a string, a bool or None."""
    return value is None or isinstance(value, (bool, int, float, str))


def is_number(value: Any) -> bool:
    """True if a value is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def computed(kind: type[ast.AST], left: Any, right: Any) -> Any:
    """The result of a binary operator. ValueError if it is unknown or too large."""
    both_lists = isinstance(left, list) and isinstance(right, list)
    both_texts = isinstance(left, str) and isinstance(right, str)
    if kind is ast.Add and (both_lists or both_texts):
        if len(left) + len(right) > _MOST_ITEMS:
            raise ValueError("it is too long")
        return left + right
    if kind is ast.Mult and isinstance(left, list) and isinstance(right, int) and len(left) * right <= _MOST_ITEMS:
        return left * right
    if kind not in _ARITHMETIC or not is_number(left) or not is_number(right):
        raise ValueError("it is not arithmetic of numbers")
    if kind is ast.Pow and (abs(right) > 64 or abs(left) > _MOST_NUMBER):
        raise ValueError("the power is too large")
    try:
        result = _ARITHMETIC[kind](left, right)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ValueError(str(error)) from None
    if isinstance(result, complex) or (isinstance(result, int) and abs(result) > _MOST_NUMBER):
        raise ValueError("the number is too large")
    return result


def compared(kind: type[ast.AST], left: Any, right: Any) -> bool:
    """True if a comparison holds. ValueError if that is unknown."""
    are_known = [isinstance(side, (Named, ParsedCall)) or is_plain(side) for side in (left, right)]
    if not all(are_known) or (not (is_plain(left) and is_plain(right)) and left is not None and right is not None):
        raise ValueError("a side of it is not known")
    try:
        return bool(_COMPARISONS[kind](left, right))
    except (TypeError, KeyError) as error:
        raise ValueError(str(error)) from None


def called_plainly(name: str, positional: list[Any], keywords: dict[str, Any]) -> Any:
    """The result of a built-in function of plain values. ValueError if it is unknown."""
    if name not in _BUILTINS or not all(map(is_plain, (*positional, *keywords.values()))):
        raise ValueError(f"{name} is not followed")
    if keywords and name != "dict":
        raise ValueError(f"{name} has arguments by name")
    try:
        result = _BUILTINS[name](*positional, **keywords)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ValueError(str(error)) from None
    if isinstance(result, int) and abs(result) > _MOST_NUMBER:
        raise ValueError("the number is too large")
    return result


_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict}
_METHODS: dict[str, Callable[[str], str]] = {"lower": str.lower, "upper": str.upper, "strip": str.strip}


def is_of_type(value: Any, kind: Any) -> bool:
    """True if a plain value is of a built-in type, as isinstance() has it. ValueError if that is unknown."""
    if not isinstance(kind, Named) or kind.text not in _TYPES or not is_plain(value):
        raise ValueError("its type is not known")
    return isinstance(value, _TYPES[kind.text])


def text_by_method(method: str, text: str) -> str:
    """The result of a method of a text, lower, upper or strip. ValueError if another is called."""
    if method not in _METHODS:
        raise ValueError(f"{method} is not followed")
    return _METHODS[method](text)


def source_of(node: ast.AST) -> str:
    """The text of an expression, shortened."""
    try:
        return shortened(" ".join(ast.unparse(node).split()), 60)
    except (RecursionError, ValueError):
        return say("an expression that is nested too deep")


def not_followed(code: str) -> str:
    """The note on code that is not followed."""
    return say("{code} is not followed", code=code)
