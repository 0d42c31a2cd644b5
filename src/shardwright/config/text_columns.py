"""Text in columns, and paragraphs as wide as the terminal."""

import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import zip_longest

_USUAL_WIDTH = 100  # columns, where no terminal has a width
_WIDTHS = 60, 120  # columns of the narrowest and of the widest lines of a paragraph
_UNBROKEN = re.compile(r"\s+|[（「“]*(?:[\x21-\x7e]+(?: %)?|\S)[，。；：、！？）」”]*")  # what no line ends within
_NUMBERED = re.compile(r"\d+\. ")  # the number of an item of a list, which its text stands beside
_PERCENT, _KEPT_PERCENT = " %", "\N{NO-BREAK SPACE}%"  # a line does not end between a number and its percent sign
_LEAST_CELL = 16  # columns of a last cell that is broken into lines
_UNBROKEN_WIDTH = 10_000  # columns of text that something else breaks into lines
_width: ContextVar[int] = ContextVar("text_width", default=0)  # 0: that of the terminal


@contextmanager
def unbroken_lines() -> Iterator[None]:
    """Within it each paragraph and each row of a table is a single line, for a page that breaks lines itself."""
    token = _width.set(_UNBROKEN_WIDTH)
    try:
        yield
    finally:
        _width.reset(token)


def terminal_width() -> int:
    """Columns of the terminal that standard output is, or of the variable COLUMNS; of a file or pipe a usual number."""
    if width := _width.get():
        return width
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    # get_terminal_size asks the terminal and, before it, COLUMNS.
    fallback = (_USUAL_WIDTH, 24)
    columns = shutil.get_terminal_size(fallback).columns if is_terminal or _has_columns() else _USUAL_WIDTH
    return max(_WIDTHS[0], columns)


def _has_columns() -> bool:
    """True if the user says how wide output is."""
    return shutil.get_terminal_size((0, 0)).columns > 0


def page_width() -> int:
    """Columns of a paragraph: those of the terminal, but no more than are read with ease."""
    return _width.get() or min(_WIDTHS[1], terminal_width())


def filled(text: str, first: str = "", hang: str = "") -> str:
    """A paragraph as lines that fit the page. `first` begins the first line, `hang` the others."""
    if not is_wide(text):
        return "\n".join(_broken_at_spaces(text, page_width(), first, hang))
    lines = wrapped(text, page_width() - len(hang))
    return "\n".join(f"{hang if number else first}{line}" for number, line in enumerate(lines))


def is_wide(text: str) -> bool:
    """True if a text has characters that take two columns, as Chinese ones do."""
    return not text.isascii() and any(unicodedata.east_asian_width(character) in "WF" for character in text)


def num_columns(text: str) -> int:
    """The columns of a text in a terminal: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of a paragraph. Chinese has no spaces, and may be broken anywhere but before its punctuation.

    A bracket or quotation mark that opens stays with what follows.
    """
    if text.isascii():
        yield from _broken_at_spaces(text, width, breaks_words=True)
        return
    line, columns = "", 0
    for word in _UNBROKEN.findall(text):
        if columns + num_columns(word.rstrip()) > width:
            yield line.rstrip()
            line, columns = "", 0
            word = word.lstrip()
        line, columns = line + word, columns + num_columns(word)
    if line:
        yield line.rstrip()


def fitting(text: str) -> str:
    """A text whose lines fit the terminal: longer ones are broken at spaces, and go on under their first word."""
    return _fitting(text, terminal_width())


def fitting_errors(text: str) -> str:
    """A text of standard error whose lines fit its terminal, which standard output may not be; else as `fitting`."""
    width = terminal_width()
    if not _has_columns() and sys.stderr is not None and sys.stderr.isatty():
        with suppress(OSError, ValueError):  # a stream that stands for a terminal may have no descriptor
            width = max(_WIDTHS[0], os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_WIDTH)
    return _fitting(text, width)


def _fitting(text: str, width: int) -> str:
    return "\n".join(_broken(line, width) if num_columns(line) > width else line for line in text.split("\n"))


def logged(text: str) -> str:
    """Lines of a log, as wide as the terminal; in a file or pipe each is a record that is searched, and stays whole."""
    return fitting(text) if is_sized() else text


def _broken(line: str, width: int) -> str:
    """Lines of one that is too long; those after the first go on under its first word, or under an item's text."""
    text = line.lstrip()
    number = _NUMBERED.match(text)
    text = text[len(number[0]) :] if number else text
    begin = line[: len(line) - len(text)]
    hang = " " * len(begin) if number else begin + "  "
    first, *others = _cell_lines(text, width - len(begin))
    others = _cell_lines(text[len(first) :].lstrip(), width - len(hang)) if others else []
    return "\n".join([begin + first, *(hang + other for other in others)])


def _cell_lines(text: str, width: int) -> list[str]:
    """Lines of a text, broken at spaces, and Chinese between its characters."""
    if is_wide(text):
        return list(wrapped(text, width))
    indent = " " * (len(text) - len(text.lstrip()))
    return _broken_at_spaces(text, width, hang=indent if 2 * len(indent) < width else "")


def _broken_at_spaces(
    text: str, width: int, first: str = "", hang: str = "", *, breaks_words: bool = False
) -> list[str]:
    """Lines of a text that has spaces between its words; `breaks_words`: also within words that are too long."""
    lines = textwrap.wrap(
        text.replace(_PERCENT, _KEPT_PERCENT),
        width,
        initial_indent=first,
        subsequent_indent=hang,
        break_on_hyphens=False,
        break_long_words=breaks_words,
    )
    return [line.replace(_KEPT_PERCENT, _PERCENT) for line in lines]


def aligned(rows: Sequence[Sequence[str]], gap: int = 2, left: Collection[int] = (0,)) -> str:
    """Rows as lines of columns, each as wide as its widest cell. Columns in `left` are aligned left, others right.

    Where the terminal is narrower, cells of left columns and the headings of others (the first row) are broken into
    lines; but columns are one nearer where that keeps words together. Where all that is not enough, further columns
    follow below, beside the first one again. A row of a single cell stands above those that follow it, as wide as the
    table.
    """
    full_rows = [row for row in rows if not _is_heading(row, rows)]
    widths = [max(map(num_columns, column)) for column in zip(*full_rows, strict=True)]
    last, room = len(widths) - 1, terminal_width() - gap * (len(widths) - 1)
    excess = sum(widths) - room
    if excess > 0 and last in left and widths[last] - excess >= _LEAST_CELL:
        widths[last] -= excess
    elif excess > 0:
        least = [_least_width(column, number in left) for number, column in enumerate(zip(*full_rows, strict=True))]
        unbroken = sum(widths[n] if n in left else least[n] for n in range(len(widths)))
        if gap > 1 and room < unbroken <= room + len(widths) - 1:
            return aligned(rows, gap - 1, left)
        if sum(least) > room and len(widths) > 2:
            return _in_parts(rows, least, gap, left)
        widths = _shrunk(widths, least, excess, left)
    return "\n".join(line for row in rows for line in _lines_of(row, widths, gap, left))


def _is_heading(row: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """True if a row of a table is a single cell, and others are not."""
    return len(row) == 1 < len(rows[0])


def is_sized() -> bool:
    """True if the output has a width: that of a terminal, or one that the user says."""
    return _has_columns() or (sys.stdout is not None and sys.stdout.isatty())


def _least_width(cells: Sequence[str], is_left: bool) -> int:
    """The width below which words of a column would be broken; numbers, which are right, keep their units."""
    heading, *body = cells
    words = [word for cell in (cells if is_left else [heading]) for word in cell.split(" ")]
    numbers = [] if is_left else [num_columns(cell) for cell in body]
    return max([min(num_columns(word), _LEAST_CELL) if is_wide(word) else len(word) for word in words] + numbers)


def _shrunk(widths: Sequence[int], least: Sequence[int], excess: int, left: Collection[int]) -> list[int]:
    """Widths less `excess` in all: first of columns with long headings, then of the widest columns of words."""
    widths = list(widths)
    for columns in ([n for n in range(len(widths)) if n not in left], [n for n in range(len(widths)) if n in left]):
        while excess > 0 and (open_columns := [n for n in columns if widths[n] > least[n]]):
            widths[max(open_columns, key=lambda n: widths[n])] -= 1
            excess -= 1
    return widths


def _in_parts(rows: Sequence[Sequence[str]], least: Sequence[int], gap: int, left: Collection[int]) -> str:
    """Columns in tables one below the other, each of which begins with the first column. Rows that have nothing in the
    columns of a further table are left out of it."""
    parts: list[list[int]] = [[]]
    used = least[0]
    for column, width in enumerate(least[1:], 1):
        if parts[-1] and used + gap + width > terminal_width():
            parts.append([])
            used = least[0]
        parts[-1].append(column)
        used += gap + width
    if len(parts) == 1:  # a word is longer than the terminal is wide
        return "\n".join(line for row in rows for line in _lines_of(row, list(least), gap, left))
    return "\n\n".join(
        aligned(
            [list(row) if _is_heading(row, rows) else [row[n] for n in (0, *part)] for row in kept],
            gap,
            [m for m, n in enumerate((0, *part)) if n in left],
        )
        for part, kept in ((part, rows if part is parts[0] else _rows_with(rows, part)) for part in parts)
    )


def _rows_with(rows: Sequence[Sequence[str]], part: Sequence[int]) -> list[Sequence[str]]:
    """The heading, and the rows that have something in some columns; of rows without a name, which go on with the row
    above, that one too."""
    kept, named = list[Sequence[str]](rows[:1]), rows[0]
    for row in rows[1:]:
        if _is_heading(row, rows):
            kept.append(row)
            continue
        named = row if row[0] else named
        if any(row[n] for n in part):
            kept += [] if any(one is named for one in kept) else [named]
            kept += [] if row is named else [row]
    return kept


def _lines_of(row: Sequence[str], widths: Sequence[int], gap: int, left: Collection[int]) -> list[str]:
    """A row as lines. One of a single cell is as wide as the terminal."""
    if len(row) == 1 < len(widths):
        widths = [max(terminal_width(), widths[0])]
    cells = [
        _cell_lines(cell, width) if num_columns(cell) > width else [cell]
        for cell, width in zip(row, widths, strict=True)
    ]
    lines = []
    for pieces in zip_longest(*cells, fillvalue=""):
        padded = [
            _padded(piece, width, column in left)
            for column, (piece, width) in enumerate(zip(pieces, widths, strict=True))
        ]
        lines.append((" " * gap).join(padded).rstrip())
    return lines


def _padded(text: str, width: int, is_left: bool) -> str:
    """A text with spaces up to `width` columns, after it or before it."""
    spaces = " " * (width - num_columns(text))
    return text + spaces if is_left else spaces + text
