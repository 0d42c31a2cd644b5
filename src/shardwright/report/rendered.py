"""Parts of a screen, with or without colours, as text as wide as the terminal, in a language."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Protocol, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from shardwright.config.phrase import ENGLISH, in_language
from shardwright.config.text_columns import is_wide, num_columns, terminal_width, wrapped
from shardwright.report.document import Part, part_text

_GAP = 2  # columns between those of a table
LEAST_ROOM = 12  # columns of the last one


@runtime_checkable
class InColours(Protocol):
    """A part of a screen that has colours."""

    def renderable(self, language: str) -> RenderableType:
        """The part in a language."""


ScreenPart = Part | InColours


@dataclass(frozen=True)
class ColouredParts:
    """Parts one below the other, each with its colour, such as "bold green", or with none."""

    parts: Sequence[tuple[Part, str]]

    def renderable(self, language: str) -> RenderableType:
        """The parts in a language."""
        text = Text()
        for number, (part, style) in enumerate(self.parts):
            text.append("\n" * bool(number) + part_text(part, language), style=style)
        return text


@dataclass(frozen=True)
class WideRows:
    """A table whose columns have the width that they need, but the last, which is broken into lines where the terminal
    ends, and left ones that would take more than half of it. Where there is no room, last columns are left out.

    Columns in `left` are aligned left, as the last is. With `is_first_best` the first row is marked, and is a single
    line, for it is told elsewhere. `below` is a part
    that stands under the table. Text of the last column that is `cut` ends with the terminal's line. The last column is
    left out where it has less than `least_room`.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = ()
    is_first_best: bool = False
    below: Part | None = None
    is_cut: bool = False
    least_room: int = LEAST_ROOM

    def renderable(self, language: str) -> RenderableType:
        """The table in a language."""
        heading, *rows = ([in_language(cell, language) for cell in row] for row in (self.heading, *self.rows))
        table = _table(heading, rows, self)
        return table if self.below is None else Group(table, part_text(self.below, language))


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], described: WideRows) -> Table:
    """The table of `WideRows`, of cells as they are shown."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    room = terminal_width()
    for column, (name, *cells) in enumerate(zip(heading, *rows, strict=True)):
        is_last = column == len(heading) - 1
        width = min(max(map(num_columns, (name, *cells))), terminal_width() if is_last else terminal_width() // 2)
        if room < min(width, described.least_room if is_last else width):
            break
        is_left = is_last or column in described.left
        is_cut = described.is_cut or not is_left
        table.add_column(
            name,
            justify="left" if is_left else "right",
            no_wrap=is_cut,
            overflow="ellipsis" if is_cut else "fold",
            width=min(width, room),
        )
        room -= width + _GAP
    for number, row in enumerate(rows):
        is_best = described.is_first_best and number == 0
        table.add_row(
            *(
                Text(cell, no_wrap=True, overflow="ellipsis") if is_best else _in_lines(cell, column)
                for cell, column in zip(row, table.columns, strict=False)
            ),
            style="green" if is_best else None,
        )
    return table


def _in_lines(cell: str, column: Column) -> str:
    """A cell whose Chinese is broken between its characters, which the table itself would break at spaces alone."""
    if column.no_wrap or not column.width or not is_wide(cell):
        return cell
    return "\n".join(wrapped(cell, column.width))


def rendered(parts: Sequence[ScreenPart | RenderableType], coloured: bool = False, language: str = ENGLISH) -> str:
    """Parts as paragraphs in a language. Only with `coloured` the text has escape sequences of a terminal."""
    console = Console(
        file=StringIO(),
        width=terminal_width(),
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=False,
    )
    texts = []
    for part in parts:
        shown = _renderable(part, language)
        with console.capture() as capture:
            console.print(shown, soft_wrap=not isinstance(shown, (Group, Table)))
        texts.append("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))
    return "\n\n".join(texts)


def _renderable(part: ScreenPart | RenderableType, language: str) -> RenderableType:
    if isinstance(part, Part):
        return part_text(part, language)
    return part.renderable(language) if isinstance(part, InColours) else part
