"""The table of a system: each row says which of its settings is which of our fields, and is read in both directions.

A SettingRow is one setting of theirs for one field of ours. A Rule is for what takes several of either: two functions,
one for each direction, side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.config.job import JobSpec
from shardwright.config.other_systems.settings import Flat, Settings, field_of


@dataclass(frozen=True)
class SettingRow:
    """A setting and a field. `names` are theirs, the newest first; `default` is what theirs is where nothing is said.

    `words` are their words for our values. A flag's words are our values for "there" and "not there". `always` writes
    the setting where it has their default, too.
    """

    names: tuple[str, ...]
    ours: str
    kind: Literal["count", "number", "flag", "word"]
    default: Any
    words: Mapping[Any, Any] = field(default_factory=dict)
    always: bool = False
    most: int = 1 << 53
    least: int = 0

    def read(self, theirs: Settings, ours: Flat) -> None:
        """Put our field down."""
        ours[self.ours] = self._value(theirs)

    def _value(self, theirs: Settings) -> Any:
        if self.kind == "word":
            return theirs.one_of(self.names, self.words, self.default)
        if self.kind == "flag":
            value = theirs.flag(self.names, self.default)
            return self.words.get(value, value)
        return (
            theirs.count(self.names, self.default, self.most, self.least)
            if self.kind == "count"
            else theirs.number(self.names, self.default)
        )

    def write(self, job: JobSpec, theirs: dict[str, Any]) -> None:
        """Put their setting down. A value that they have no word for is left out, and reading it back shows that."""
        value = field_of(job, self.ours)
        if self.words:
            found = [word for word, one in self.words.items() if one == value]
            if not found:
                return
            value = found[0]
        if self.always or value != self.default:
            theirs[self.names[0]] = value


@dataclass(frozen=True)
class Rule:
    """Several settings and several fields. `names` are the settings that it writes. What is read elsewhere has no
    `reads`, and what their newest releases have no setting for no `writes`."""

    names: tuple[str, ...]
    reads: Callable[[Settings, Flat], None] | None
    writes: Callable[[JobSpec, dict[str, Any]], None] | None = None

    def read(self, theirs: Settings, ours: Flat) -> None:
        """Put our fields down."""
        if self.reads is not None:
            self.reads(theirs, ours)

    def write(self, job: JobSpec, theirs: dict[str, Any]) -> None:
        """Put their settings down."""
        if self.writes is not None:
            self.writes(job, theirs)


Table = Sequence[SettingRow | Rule]


def count(names: str, ours: str, default: int = 1, always: bool = False, most: int = 1 << 53) -> SettingRow:
    """A row of a whole number."""
    return SettingRow(tuple(names.split()), ours, "count", default, always=always, most=most)


def degree(names: str, ours: str, most: int, always: bool = False) -> SettingRow:
    """A row of a number of ranks, or of something else of which there is one at least."""
    return SettingRow(tuple(names.split()), ours, "count", 1, always=always, most=most, least=1)


def number(names: str, ours: str, default: float, always: bool = False) -> SettingRow:
    """A row of a number."""
    return SettingRow(tuple(names.split()), ours, "number", default, always=always)


def flag(names: str, ours: str, there: Any = True, missing: Any = False, default: bool = False) -> SettingRow:
    """A row of an option that is there or not."""
    return SettingRow(tuple(names.split()), ours, "flag", default, {True: there, False: missing})


def word(names: str, ours: str, words: Mapping[str, Any], default: str, always: bool = False) -> SettingRow:
    """A row of a word."""
    return SettingRow(tuple(names.split()), ours, "word", default, words, always)


def read_row(row: SettingRow | Rule, theirs: Settings, ours: Flat) -> None:
    """Our fields of a row, with what is there of the settings that it was read from."""
    asked, theirs.asked = theirs.asked, set()
    row.read(theirs, ours)
    for field_name in theirs.overrides.keys() & ours.keys():  # rows behind it go by what is said beside the files
        if type(ours[field_name]) is int and (said := theirs.overridden(field_name)) is not None:
            ours[field_name] = said
    found = tuple(name for name in theirs.given if name in theirs.asked)
    theirs.sources |= dict.fromkeys(row.names, found)
    theirs.asked |= asked


def write_table(table: Table, job: JobSpec) -> dict[str, Any]:
    """Their settings of a job."""
    theirs: dict[str, Any] = {}
    for row in table:
        row.write(job, theirs)
    return theirs
