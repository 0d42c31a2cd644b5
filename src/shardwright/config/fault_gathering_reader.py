"""A reader of values that others wrote: settings of other systems, keys of a config.json, arguments of a call.

Whole numbers in texts have ASCII digits only, and at most 18 of them, so that they fit 64 bits.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

_MOST_DIGITS = 18


@dataclass
class FaultGatheringReader:
    """A reader that gathers the faults of all values. A value of the wrong kind adds a fault, and the default is
    returned in its place.

    `given` has the values by name; it is empty if each value is handed in by itself. `names_read` are the names that
    were asked for, so that a name that nothing reads is known at the end. A kind of reader has its own words for a
    fault (`fault_text`).
    """

    given: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list, kw_only=True)
    names_read: set[str] = field(default_factory=set, kw_only=True)

    def fault_text(self, name: str, value: Any, expected: str) -> str:
        """The fault of a value that is not what is expected."""
        raise NotImplementedError

    def raw(self, *names: str) -> Any:
        """The value of the first name that is present, unconverted; None if all are absent."""
        self.names_read.update(names)
        return next((value for name in names if (value := self.given.get(name)) is not None), None)

    def checked(self, name: str, value: Any, is_valid: bool, expected: str, default: Any) -> Any:
        """The value if it is valid; else the default, with a fault."""
        return value if is_valid else self.refused(name, value, expected, default)

    def refused(self, name: str, value: Any, expected: str, default: Any) -> Any:
        """The default, with a fault of the value."""
        self.faults.append(self.fault_text(name, value, expected))
        return default

    def ignore(self, *names: str) -> None:
        """Mark names as read."""
        self.names_read.update(names)

    def unread(self) -> list[str]:
        """Names that nothing has read and whose values may have an effect: null, false and empty values have none."""
        return [name for name, value in self.given.items() if name not in self.names_read and not _is_empty(value)]


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (list, dict, str)) and not value)


def is_whole(value: Any) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """True for a number, not a bool, that a float can hold: an int of 400 digits is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def whole(text: str) -> int | None:
    """The number of a text of digits; None for any other text, such as "²", which Python counts as a digit, too."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def signed(text: str) -> int | None:
    """The number of a text of digits, with or without a minus before them; None for any other text."""
    number = whole(text[1:] if text.startswith("-") else text)
    return None if number is None else -number if text.startswith("-") else number
