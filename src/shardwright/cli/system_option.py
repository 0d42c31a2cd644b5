"""Options that take the name of a training system whose files are read or written."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardwright.config.registry import Registry


def systems_for(is_written: bool) -> "Registry[Any]":
    """The systems that are written, or all that are read. They are imported here, as most commands need none."""
    from shardwright.interchange.system import SOURCES, SYSTEMS

    return SYSTEMS if is_written else SOURCES


class SystemName(click.ParamType[str]):
    """The name of a system that is read, or of one that is also written; the value is the name."""

    name = "system"

    def __init__(self, is_written: bool) -> None:
        self.is_written = is_written

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name, if there is such a system; else an error that lists all."""
        return self._choice.convert(value, param, ctx)

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        """The names, for an error that says that one is missing."""
        return self._choice.get_missing_message(param, ctx)

    @property
    def _choice(self) -> click.Choice[str]:
        return click.Choice(systems_for(self.is_written).names)


class SystemOption(click.Option):
    """An option whose value is the name of a system."""

    def __init__(self, *args: Any, is_written: bool, **fields: Any) -> None:
        super().__init__(*args, **fields | {"type": SystemName(is_written), "metavar": "SYSTEM"})
        self.is_written = is_written


class ListedSystemOption(SystemOption):
    """An option of a command that is about systems: its help lists their names, and imports them for that."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option with its meaning, and the names in brackets."""
        record = super().get_help_record(ctx)
        return record and (record[0], f"{record[1]}  [{', '.join(self._listed())}]")

    def _listed(self) -> Sequence[str]:
        return systems_for(self.is_written).names


class RunSystemOption(ListedSystemOption):
    """An option for a system whose jobs a command starts: its help lists the names of these systems."""

    def _listed(self) -> Sequence[str]:
        from shardwright.interchange.system import names_with_run_files

        return names_with_run_files()
