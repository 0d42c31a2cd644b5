"""The table of a system: each row pairs a setting of the system with a field of a job, and works in both directions.

A SettingRow maps one setting of the system to one field of a job. A Rule maps several settings to several fields with
two functions, one for each direction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwright.config.job import JobSpec
from shardwright.interchange.reading.settings import Flat, Settings, field_of


@dataclass(frozen=True)
class SettingRow:
    """A setting and a field. `names` are the names of the setting, the newest first; `default` is its value if absent.

    `words` maps the system's words to values of the field; for a flag it maps True (present) and False (absent).
    `always` writes the setting even if it has its default. `least` and `most` limit a count. `read_if` and `written_if`
    are conditions, None without one.
    """

    names: tuple[str, ...]
    job_field: str
    kind: Literal["count", "number", "flag", "word"]
    default: Any
    words: Mapping[Any, Any] = field(default_factory=dict)
    always: bool = False
    most: int = 1 << 53
    least: int = 0
    read_if: Callable[[Settings, Flat], bool] | None = None
    written_if: Callable[[JobSpec], bool] | None = None

    def under(
        self, read_if: Callable[[Settings, Flat], bool] | None, written_if: Callable[[JobSpec], bool] | None
    ) -> "SettingRow":
        """The row under conditions: one on what was read so far, and one on the job that is written."""
        return replace(self, read_if=read_if, written_if=written_if)

    def read(self, settings: Settings, fields: Flat) -> None:
        """Set the field of the job."""
        if self.read_if is None or self.read_if(settings, fields):
            fields[self.job_field] = self._value(settings)

    def _value(self, settings: Settings) -> Any:
        if self.kind == "word":
            return settings.one_of(self.names, self.words, self.default, self.job_field)
        if self.kind == "flag":
            value = settings.flag(self.names, self.default)
            return self.words.get(value, value)
        return (
            settings.count(self.names, self.default, self.most, self.least)
            if self.kind == "count"
            else settings.number(self.names, self.default)
        )

    def write(self, job: JobSpec, settings: dict[str, Any]) -> None:
        """Write the setting. A value without a word in the system is left out; reading the files back shows that."""
        if self.written_if is not None and not self.written_if(job):
            return
        value = field_of(job, self.job_field)
        if self.words:
            words = [word for word, job_value in self.words.items() if job_value == value]
            if not words:
                return
            value = words[0]
        if self.always or value != self.default:
            settings[self.names[0]] = value


@dataclass(frozen=True)
class Rule:
    """Several settings and several fields. `names` are the settings that the rule writes. `reads` is None if another
    row reads them, and `writes` is None if the system's newest releases have no setting for the fields."""

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
    """A row of a number of ranks or of another count that is at least 1."""
    return SettingRow(tuple(names.split()), job_field, "count", 1, always=always, most=most, least=1)


def number(names: str, job_field: str, default: float, always: bool = False) -> SettingRow:
    """A row of a number."""
    return SettingRow(tuple(names.split()), job_field, "number", default, always=always)


def flag(names: str, job_field: str, present: Any = True, absent: Any = False, default: bool = False) -> SettingRow:
    """A row of an option; the field is `present` if the option is there, else `absent`."""
    return SettingRow(tuple(names.split()), job_field, "flag", default, {True: present, False: absent})


def word(names: str, job_field: str, words: Mapping[str, Any], default: str, always: bool = False) -> SettingRow:
    """A row of a word, which `words` maps to a value of the field."""
    return SettingRow(tuple(names.split()), job_field, "word", default, words, always)


def word_for(value: Any, words: Mapping[str, Any]) -> str:
    """The system's first word for a value of a job; "" if it has none. A word that is left out is found as a difference
    when the written job is read again."""
    return next((word for word, own_value in words.items() if own_value == value), "")


def never(job: JobSpec) -> bool:
    """The condition of rows that are only read."""
    return False


def read_row(row: SettingRow | Rule, settings: Settings, fields: Flat) -> None:
    """Set the fields of a row, and record in `settings.sources` which present settings the row has read."""
    earlier, settings.names_read = settings.names_read, set()
    row.read(settings, fields)
    for field_name in settings.overrides.keys() & fields.keys():  # later rows use the values of --set
        if type(fields[field_name]) is int and (override := settings.overridden(field_name)) is not None:
            fields[field_name] = override
    present = tuple(name for name in settings.given if name in settings.names_read)
    settings.sources |= dict.fromkeys(row.names, present)
    settings.names_read |= earlier


def write_table(table: Table, job: JobSpec) -> dict[str, Any]:
    """The system's settings for a job."""
    settings: dict[str, Any] = {}
    for row in table:
        row.write(job, settings)
    return settings
