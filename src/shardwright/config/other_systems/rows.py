"""The table of a system: each row pairs a setting of it with a field of a job, and is read in both directions.

A SettingRow is one setting of the other system for one field of a job. A Rule is for several of either: two functions,
one for each direction, side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.config.job import JobSpec
from shardwright.config.other_systems.settings import Flat, Settings, field_of


@dataclass(frozen=True)
class SettingRow:
    """A setting and a field. `names` are those of the setting, the newest first; `default` is its value if absent.

    `words` are the system's words for our values. The words of a flag are our values for "there" and "not there".
    `always` writes the setting even if it has its default.
    """

    names: tuple[str, ...]
    job_field: str
    kind: Literal["count", "number", "flag", "word"]
    default: Any
    words: Mapping[Any, Any] = field(default_factory=dict)
    always: bool = False
    most: int = 1 << 53
    least: int = 0

    def read(self, settings: Settings, fields: Flat) -> None:
        """Set the field of the job."""
        fields[self.job_field] = self._value(settings)

    def _value(self, settings: Settings) -> Any:
        if self.kind == "word":
            return settings.one_of(self.names, self.words, self.default)
        if self.kind == "flag":
            value = settings.flag(self.names, self.default)
            return self.words.get(value, value)
        return (
            settings.count(self.names, self.default, self.most, self.least)
            if self.kind == "count"
            else settings.number(self.names, self.default)
        )

    def write(self, job: JobSpec, settings: dict[str, Any]) -> None:
        """Write the setting. A value for which the system has no word is left out, and reading it back shows that."""
        value = field_of(job, self.job_field)
        if self.words:
            words = [word for word, one in self.words.items() if one == value]
            if not words:
                return
            value = words[0]
        if self.always or value != self.default:
            settings[self.names[0]] = value


@dataclass(frozen=True)
class Rule:
    """Several settings and several fields. `names` are the settings that it writes. `reads` is None if they are read
    elsewhere, and `writes` is None if the system's newest releases have no setting for the fields."""

    names: tuple[str, ...]
    reads: Callable[[Settings, Flat], None] | None
    writes: Callable[[JobSpec, dict[str, Any]], None] | None = None

    def read(self, settings: Settings, fields: Flat) -> None:
        """Set the fields of the job."""
        if self.reads is not None:
            self.reads(settings, fields)

    def write(self, job: JobSpec, settings: dict[str, Any]) -> None:
        """Write the settings."""
        if self.writes is not None:
            self.writes(job, settings)


Table = Sequence[SettingRow | Rule]


def count(names: str, job_field: str, default: int = 1, always: bool = False, most: int = 1 << 53) -> SettingRow:
    """A row of a whole number."""
    return SettingRow(tuple(names.split()), job_field, "count", default, always=always, most=most)


def degree(names: str, job_field: str, most: int, always: bool = False) -> SettingRow:
    """A row of a number of ranks, or of something else of which there is one at least."""
    return SettingRow(tuple(names.split()), job_field, "count", 1, always=always, most=most, least=1)


def number(names: str, job_field: str, default: float, always: bool = False) -> SettingRow:
    """A row of a number."""
    return SettingRow(tuple(names.split()), job_field, "number", default, always=always)


def flag(names: str, job_field: str, there: Any = True, missing: Any = False, default: bool = False) -> SettingRow:
    """A row of an option that is there or not."""
    return SettingRow(tuple(names.split()), job_field, "flag", default, {True: there, False: missing})


def word(names: str, job_field: str, words: Mapping[str, Any], default: str, always: bool = False) -> SettingRow:
    """A row of a word."""
    return SettingRow(tuple(names.split()), job_field, "word", default, words, always)


def read_row(row: SettingRow | Rule, settings: Settings, fields: Flat) -> None:
    """Our fields of a row, with what is there of the settings that it was read from."""
    asked, settings.asked = settings.asked, set()
    row.read(settings, fields)
    for field_name in settings.overrides.keys() & fields.keys():  # rows behind it go by what is said beside the files
        if type(fields[field_name]) is int and (override := settings.overridden(field_name)) is not None:
            fields[field_name] = override
    present = tuple(name for name in settings.given if name in settings.asked)
    settings.sources |= dict.fromkeys(row.names, present)
    settings.asked |= asked


def write_table(table: Table, job: JobSpec) -> dict[str, Any]:
    """Their settings of a job."""
    settings: dict[str, Any] = {}
    for row in table:
        row.write(job, settings)
    return settings
