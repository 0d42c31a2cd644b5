"""Parts of a screen, with or without colours, as text as wide as the terminal."""

from collections.abc import Collection, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardwright.report.text_columns import terminal_width

_GAP = 2  # columns between those of a table
_LEAST_ROOM = 12  # columns of the last one


def wide_table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (), is_first_best: bool = False
) -> Table:
    """A table whose columns have the width that they need, but the last, which is cut where the terminal ends. Where
    there is no room, last columns are left out.

    Columns in `left` are aligned left, as the last is. With `is_first_best` the first row is marked.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    room = terminal_width()
    for column, (name, *cells) in enumerate(zip(heading, *rows, strict=True)):
        is_last = column == len(heading) - 1
        width = min(max(map(len, (name, *cells))), terminal_width() if is_last else terminal_width() // 2)
        if room < min(width, _LEAST_ROOM if is_last else width):
            break
        is_left = is_last or column in left
        table.add_column(
            name, justify="left" if is_left else "right", no_wrap=True, overflow="ellipsis", width=min(width, room)
        )
        room -= width + _GAP
    for number, row in enumerate(rows):
        table.add_row(*row[: len(table.columns)], style="green" if is_first_best and number == 0 else None)
    return table


def rendered(parts: Sequence[RenderableType], coloured: bool = False) -> str:
    """Parts as paragraphs. Only with `coloured` the text has escape sequences of a terminal."""
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
        with console.capture() as capture:
            console.print(part, soft_wrap=not isinstance(part, (Group, Table)))
        texts.append("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))
    return "\n\n".join(texts)
