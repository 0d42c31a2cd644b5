"""Text in columns, and paragraphs as wide as the terminal."""

import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence

_USUAL_WIDTH = 100  # columns, where no terminal has a width
_WIDTHS = 60, 120  # columns of the narrowest and of the widest lines of a paragraph
_LEAST_CELL = 16  # columns of a last cell that is broken into lines


def terminal_width() -> int:
    """Columns of the terminal that standard output is, or of the variable COLUMNS; of a file or pipe a usual number."""
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
    return min(_WIDTHS[1], terminal_width())


def filled(text: str, first: str = "", hang: str = "") -> str:
    """A paragraph as lines that fit the page. `first` begins the first line, `hang` the others."""
    if not is_wide(text):
        return textwrap.fill(
            text,
            page_width(),
            initial_indent=first,
            subsequent_indent=hang,
            break_on_hyphens=False,
            break_long_words=False,
        )
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
    """Lines of a paragraph. Chinese has no spaces, and may be broken anywhere but before its punctuation."""
    if text.isascii():
        yield from textwrap.wrap(text, width, break_on_hyphens=False)
        return
    line, columns = "", 0
    for word in re.findall(r"[\x21-\x7e]+|\s+|.[，。；：、！？）」”]*", text):
        if columns + num_columns(word.rstrip()) > width:
            yield line.rstrip()
            line, columns = "", 0
            word = word.lstrip()
        line, columns = line + word, columns + num_columns(word)
    if line:
        yield line.rstrip()


def aligned(rows: Sequence[Sequence[str]], gap: int = 2, left: Collection[int] = (0,)) -> str:
    """Rows as lines of columns, each as wide as its widest cell. Columns in `left` are aligned left, others right.

    A last column that is aligned left and does not fit the terminal is broken into lines.
    """
    widths = [max(map(num_columns, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    room = terminal_width() - sum(widths[:-1]) - gap * last
    is_broken = last in left and _LEAST_CELL <= room < widths[-1]
    lines = []
    for row in rows:
        cells = [
            cell + " " * (width - num_columns(cell)) if column in left else " " * (width - num_columns(cell)) + cell
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        pieces = list(wrapped(row[-1], room)) if is_broken and row[-1] else cells[-1:]
        lines.append((" " * gap).join([*cells[:-1], pieces[0]]).rstrip())
        lines += [" " * (terminal_width() - room) + piece for piece in pieces[1:]]
    return "\n".join(lines)
