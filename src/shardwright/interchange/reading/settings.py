"""The settings of a launch script or a configuration of another system, read one at a time.

No setting is dropped silently: a setting that no table reads is reported at the end, with the reason if it is known to
leave the plan unchanged.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import FaultGatheringReader, is_finite, signed, whole
from shardwright.config.phrase import say
from shardwright.interchange.reading.setting_notes import none_of, wrong_value
from shardwright.interchange.reading.shell_marks import UNKNOWN

Flat = dict[str, Any]  # fields of a job by their full names: {"plan.tp": 8}


@dataclass
class Settings(FaultGatheringReader):
    """Settings by name.

    A value in `given` is text (from a command line) or plain data (from a configuration); True is an option without a
    value. Messages show a name as `prefix` (such as "--") and the name, or its spelling in `spelled`.

    A method takes all names of one setting and returns the value of the first name that is present, else the default.
    `notes` lists assumptions; `lost` lists settings that were read and that a job cannot express.
    """

    prefix: str = ""
    spelled: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    needed: dict[str, str] = field(default_factory=dict)  # names -> values that depend on variables that nobody sets
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names that a row writes -> names that it read
    overrides: Mapping[str, str] = field(default_factory=dict)  # fields that --set gives beside the files
    automatic: frozenset[str] = frozenset()  # names whose value is "auto": another file has it
    family: str = ""  # of the model, as its config.json or the catalog has it
    adapted_modules: tuple[str, ...] = ()  # names of modules that settings give adapters
    all_linear: str = ""  # the setting that gives all linear modules adapters, if one does
    four_bits: str = ""  # the setting that loads linear modules in 4 bits, if one does and none speaks of experts
    asks_ranks: bool = False  # a fault asks for the number of devices already

    def has(self, *names: str) -> bool:
        """True if one of the names is present, with a value other than null and false."""
        self.names_read.update(names)
        return any(self.given.get(name) is not None and self.given[name] is not False for name in names)

    def count(self, names: str | Sequence[str], default: int, most: int = 1 << 53, least: int = 0) -> int:
        """A whole number from `least` to `most`, not negative."""
        value = self._number(names)
        if value is None:
            return default
        if not float(value).is_integer() or value < 0:
            return self._wrong(names, say("a whole number, not negative"), default)
        if not least <= value <= most:
            expected = say("at most {most:,}", most=most) if value > most else say("at least {least}", least=least)
            return self._wrong(names, expected, default)
        return int(value)

    def number(self, names: str | Sequence[str], default: float) -> float:
        """A finite number."""
        value = self._number(names)
        return default if value is None else float(value)

    def flag(self, names: str | Sequence[str], default: bool = False) -> bool:
        """True if an option is present without a value, or its value is true."""
        value = self.raw(*_names(names))
        if value is None or self._is_unknown(value, names):
            return default
        text = str(value).lower()
        if text in ("true", "1", "yes", "false", "0", "no"):
            return text in ("true", "1", "yes")
        return self._wrong(names, say("true or false"), default)

    def text(self, names: str | Sequence[str], default: str = "") -> str:
        """A word."""
        value = self.raw(*_names(names))
        if value is None:
            return default
        if isinstance(value, (list, dict)):
            return self._wrong(names, say("one word"), default)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def words(self, names: str | Sequence[str]) -> list[str]:
        """A list of words; empty if the setting is absent."""
        value = self.raw(*_names(names))
        if value is None or value is True:
            return []
        return [str(word) for word in value] if isinstance(value, list) else str(value).split()

    def one_of(self, names: str | Sequence[str], words: Mapping[str, Any], default: str, job_field: str = "") -> Any:
        """The value in `words` for the system's word; case does not matter. A word that is unknown is no fault if --set
        gives the field of the job that it stands for."""
        word = self.text(names, default)
        if self._is_unknown(word, names):
            word = default
        known = {key.lower(): value for key, value in words.items()}
        if word.lower() in known:
            return known[word.lower()]
        if job_field not in self.overrides:
            setting = f"{self.shown(_names(names)[0])} {shortened(word)}"
            self.faults.append(none_of(setting, words, job_field))
        return known[default.lower()]

    def note(self, text: str) -> None:
        """Add an assumption, unless --set, or --as for the software, already gives the field that the text suggests to
        set."""
        given = [f"--set {name}=" for name in self.overrides] + ["(--as NAME"] * ("cluster.software" in self.overrides)
        if not any(words in text for words in given):
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
            self.lost.append(say("{subject}: {fault}", subject=self.setting_text(name), fault=why))

    def is_named(self, name: str, words: Collection[str]) -> bool:
        """True if one of several words of the user's is the name of a setting, as it is kept or as it is shown."""
        return not {name, self.shown(name), self.shown(name).lstrip("-")}.isdisjoint(words)

    def shown(self, name: str) -> str:
        """A name as the system's users write it."""
        return self.prefix + self.spelled.get(name, name)

    def setting_text(self, name: str) -> str:
        """A setting with its value, as the system's users write it."""
        return self.shown(name) + self._value_text(name)

    def fault_text(self, name: str, value: Any, expected: str) -> str:
        """The fault of a setting, with its value."""
        return wrong_value(self.setting_text(name), expected)

    def _value_text(self, name: str) -> str:
        value = self.given.get(name)
        if value is True and self.prefix:
            return ""
        text = plain_text(value)
        return (" " if self.prefix else " = ") + shortened(text)

    def _number(self, names: str | Sequence[str]) -> float | None:
        """The number of a setting; None if it is absent, unknown or, with a fault, no finite number."""
        value = self.raw(*_names(names))
        if value is None or self._is_unknown(value, names):
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            try:
                exact = signed(str(value))
                value = float(str(value)) if exact is None else exact
            except ValueError:
                return self._wrong(names, say("a number"), None)
        return value if is_finite(value) else self._wrong(names, say("a finite number"), None)

    def _present(self, names: str | Sequence[str]) -> str:
        return next(name for name in _names(names) if self.given.get(name) is not None)

    def _is_unknown(self, value: Any, names: str | Sequence[str]) -> bool:
        """True if a value depends on a shell variable that is not set. The setting's name is then added to `needed`."""
        if not isinstance(value, (str, list)) or not UNKNOWN.search(text := plain_text(value)):
            return False
        self.needed[self._present(names)] = text
        return True

    def _wrong(self, names: str | Sequence[str], expected: str, default: Any) -> Any:
        """The default, with a fault unless the value is unknown or has this fault already."""
        name = self._present(names)
        value = self.given[name]
        is_told = self._is_unknown(value, names) or self.fault_text(name, value, expected) in self.faults
        return default if is_told else self.refused(name, value, expected, default)


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
