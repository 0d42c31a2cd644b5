"""The settings of a launch script or a configuration of another system, read one at a time.

No setting is dropped silently: a setting that no table reads is reported at the end, with the reason if it is known to
leave the plan unchanged.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.config.base import shortened
from shardwright.interchange.reading.shell_values import UNKNOWN
from shardwright.interchange.reading.whole_text import signed, whole

Flat = dict[str, Any]  # fields of a job by their full names: {"plan.tp": 8}


@dataclass
class Settings:
    """Settings by name.

    A value in `given` is text (from a command line) or plain data (from a configuration); True is an option without a
    value. Messages show a name as `prefix` (such as "--") and the name, or its spelling in `spelled`.

    A method takes all names of one setting and returns the value of the first name that is present, else the default.
    A value of the wrong kind adds a fault, and the default is returned. `notes` lists assumptions; `lost` lists
    settings that were read and that a job cannot express.
    """

    given: dict[str, Any]
    prefix: str = ""
    spelled: Mapping[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)  # names whose values depend on variables that nobody has set
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names that a row writes -> names that it read
    overrides: Mapping[str, str] = field(default_factory=dict)  # fields that --set gives beside the files
    automatic: frozenset[str] = frozenset()  # names whose value is "auto": another file has it

    def has(self, *names: str) -> bool:
        """True if one of the names is present, with a value other than null and false."""
        self.asked.update(names)
        return any(self.given.get(name) is not None and self.given[name] is not False for name in names)

    def raw(self, *names: str) -> Any:
        """The value, unconverted; None if the setting is absent."""
        self.asked.update(names)
        return next((value for name in names if (value := self.given.get(name)) is not None), None)

    def count(self, names: str | Sequence[str], default: int, most: int = 1 << 53, least: int = 0) -> int:
        """A whole number from `least` to `most`, not negative."""
        value = self._number(_names(names))
        if value is None:
            return default
        if not float(value).is_integer() or value < 0:
            self._wrong(_names(names), "a whole number, not negative")
            return default
        if not least <= value <= most:
            self._wrong(_names(names), f"at most {most:,}" if value > most else f"at least {least}")
            return default
        return int(value)

    def number(self, names: str | Sequence[str], default: float) -> float:
        """A finite number."""
        value = self._number(_names(names))
        return default if value is None else float(value)

    def flag(self, names: str | Sequence[str], default: bool = False) -> bool:
        """True if an option is present without a value, or its value is true."""
        value = self.raw(*_names(names))
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if self._is_unknown(value, _names(names)):
            return default
        text = str(value).lower()
        if text in ("true", "1", "yes", "false", "0", "no"):
            return text in ("true", "1", "yes")
        self._wrong(_names(names), "true or false")
        return default

    def text(self, names: str | Sequence[str], default: str = "") -> str:
        """A word."""
        value = self.raw(*_names(names))
        if value is None or isinstance(value, (list, dict)):
            if value is not None:
                self._wrong(_names(names), "one word")
            return default
        return str(value).lower() if isinstance(value, bool) else str(value)

    def words(self, names: str | Sequence[str]) -> list[str]:
        """A list of words; empty if the setting is absent."""
        value = self.raw(*_names(names))
        if value is None or value is True:
            return []
        return [str(word) for word in value] if isinstance(value, list) else str(value).split()

    def one_of(self, names: str | Sequence[str], words: Mapping[str, Any], default: str) -> Any:
        """The value in `words` for the system's word; case does not matter."""
        word = self.text(names, default)
        if self._is_unknown(word, _names(names)):
            word = default
        known = {key.lower(): value for key, value in words.items()}
        if word.lower() in known:
            return known[word.lower()]
        choices = ", ".join(words)
        self.faults.append(f"{self.shown(_names(names)[0])} {shortened(word)} can't be said here; use one of {choices}")
        return known[default.lower()]

    def ignore(self, *names: str) -> None:
        """Mark settings as read."""
        self.asked.update(names)

    def note(self, text: str) -> None:
        """Add an assumption, unless --set already gives the field that the text suggests to set."""
        if not any(f"--set {name}=" in text for name in self.overrides):
            self.notes.append(text)

    def overridden(self, name: str) -> int | None:
        """The positive whole number that --set gives for a field; None if it gives none."""
        return whole(self.overrides.get(name, "")) or None

    def is_open(self, *names: str) -> bool:
        """True if no file gives the setting, not even as "auto"."""
        return not any(name in self.automatic or self.given.get(name) is not None for name in names)

    def lose(self, name: str, why: str) -> None:
        """Report that a setting, if present, is not in the job, and why."""
        if self.has(name):
            self.lost.append(f"{self.shown(name)}{self._value_text(name)}: {why}")

    def shown(self, name: str) -> str:
        """A name as the system's users write it."""
        return self.prefix + self.spelled.get(name, name)

    def said(self, name: str) -> str:
        """A setting with its value, as the system's users write it."""
        return self.shown(name) + self._value_text(name)

    def unread(self) -> list[str]:
        """Names that no table has read and whose values are not empty."""
        return [name for name, value in self.given.items() if name not in self.asked and _is_present(value)]

    def _value_text(self, name: str) -> str:
        value = self.given.get(name)
        if value is True and self.prefix:
            return ""
        text = plain_text(value)
        return (" " if self.prefix else " = ") + shortened(text)

    def _number(self, names: tuple[str, ...]) -> float | None:
        value = self.raw(*names)
        if value is None:
            return None
        if self._is_unknown(value, names):
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            read_value: float = value
        else:
            try:
                text = str(value)
                exact = signed(text)
                read_value = float(text) if exact is None else exact
            except ValueError:
                self._wrong(names, "a number")
                return None
        if not abs(read_value) <= sys.float_info.max:
            self._wrong(names, "a finite number")
            return None
        return read_value

    def _is_unknown(self, value: Any, names: tuple[str, ...]) -> bool:
        """True if a value depends on a shell variable that is not set. The setting's name is then added to `needed`."""
        if not isinstance(value, (str, list)) or not UNKNOWN.search(plain_text(value)):
            return False
        self.needed.append(next(name for name in names if self.given.get(name) is not None))
        return True

    def _wrong(self, names: tuple[str, ...], wanted: str) -> None:
        name = next(name for name in names if self.given.get(name) is not None)
        if self._is_unknown(self.given[name], names):
            return
        fault = f"{self.said(name)}: it should be {wanted}"
        if fault not in self.faults:
            self.faults.append(fault)


def _is_present(value: Any) -> bool:
    """True if a value may have an effect: null, false and an empty value count as absent."""
    return not (value is None or value is False or (isinstance(value, (list, dict, str)) and not value))


def plain_text(value: Any) -> str:
    """A value as text; the items of a list are joined by blanks."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def field_of(job: Any, path: str) -> Any:
    """The value of a field of a job by its full name, such as "plan.tp"."""
    for name in path.split("."):
        job = getattr(job, name)
    return job
