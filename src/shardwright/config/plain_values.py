"""Values of a Python program as plain values that a file could have: numbers of numpy and torch, paths and tuples are
converted."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import PurePath
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.fault_gathering_reader import FaultGatheringReader, is_whole
from shardwright.config.phrase import say


def plain(value: Any) -> Any:
    """A value, and all values within it, as lists, dictionaries, texts and numbers. Other values stay as they are.

    >>> plain({"folder": PurePath("runs/a"), "layout": (1, 1)})
    {'folder': 'runs/a', 'layout': [1, 1]}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    if getattr(value, "ndim", None) == 0 and callable(item := getattr(value, "item", None)):
        return item()  # a number that is an array without dims
    return value


def strange(value: Any, name: str) -> Iterator[str]:
    """A fault for each value within a value of this name that no file could have."""
    value = plain(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strange(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from strange(inner, f"{name}[{number}]")
    elif not (value is None or isinstance(value, str | bool | int | float | date | time)):
        yield say(
            "{name} is {value}; use a text, a number, true or false, a list or a dictionary",
            name=name,
            value=_shown(value),
        )


class GivenOptions(FaultGatheringReader):
    """A reader of the options of a call, which are handed in one by one."""

    def fault_text(self, name: str, value: Any, expected: str) -> str:
        """The fault of an option, with a value that it could have."""
        return say("{name} is {value}; use {expected}", name=name, value=_shown(value), expected=expected)

    def whole(self, name: str, value: Any, least: int) -> int:
        """An integer of at least `least`."""
        number = plain(value)
        is_valid = is_whole(number) and number >= least
        return int(self.checked(name, value, is_valid, say("a whole number, {least} or more", least=least), least))

    def wholes(self, name: str, value: Any, least: int) -> list[int]:
        """Several integers of at least `least`."""
        numbers = plain(value)
        is_valid = isinstance(numbers, list) and bool(numbers) and all(is_whole(n) and n >= least for n in numbers)
        return list(
            self.checked(
                name, numbers, is_valid, say("whole numbers, {least} or more, such as [8, 16]", least=least), [least]
            )
        )

    def number(self, name: str, value: Any, default: float) -> float:
        """A number of any kind."""
        number = plain(value)
        is_valid = is_whole(number) or isinstance(number, float)
        return float(
            self.checked(name, value, is_valid, say("a number, such as {default:g}", default=default), default)
        )

    def text(self, name: str, value: Any, example: str) -> str:
        """A text, or a path."""
        is_valid = isinstance(value, str | PurePath)
        return str(self.checked(name, value, is_valid, say("a text, such as {example}", example=repr(example)), ""))

    def one_of(self, name: str, value: Any, known: Sequence[str]) -> str:
        """A text that is one of the `known` ones."""
        if isinstance(value, str) and value in known:
            return value
        self.faults.append(
            say("{name} {value} is none; use {names}", name=name, value=_shown(value), names=tuple(known))
        )
        return known[0]

    def texts(self, name: str, value: Any, example: str) -> list[str]:
        """A text, or several, as a list."""
        strings = [value] if isinstance(value, str) else value
        is_valid = isinstance(strings, list | tuple) and all(isinstance(string, str) for string in strings)
        return list(self.checked(name, strings, is_valid, say("texts, such as [{example}]", example=repr(example)), []))

    def fields(self, name: str, value: Any, example: str) -> dict[str, Any]:
        """A dictionary of fields; None gives an empty one."""
        is_valid, expected = (
            isinstance(value, Mapping | None),
            say("a dictionary of its fields, such as {example}", example=example),
        )
        return dict(plain(self.checked(name, value, is_valid, expected, {}) or {}))

    def check(self, subject: str) -> None:
        """Raise PlanError if there are faults."""
        if self.faults:
            raise PlanError(subject, self.faults)


def _shown(value: object) -> str:
    return shortened(" ".join(repr(value).split()), 80)  # some values are shown on several lines
