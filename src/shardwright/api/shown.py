"""The forms of a result: text in a terminal, a dictionary as --json has it, and a frame of pandas."""

from abc import ABC, abstractmethod
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from shardwright.config.base import RunError
from shardwright.config.phrase import say

if TYPE_CHECKING:
    from pandas import DataFrame

_FRAME = "width: 100%; height: 520px; border: 0"


class Shown(ABC):
    """A result that prints as its command does, and can be turned into data."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The result for reading, as the command prints it."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The result as the command's --json prints it. Bytes, seconds, US dollars; None is unknown."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `frame`, each a dictionary of plain values by column."""

    def frame(self) -> "DataFrame":
        """The result's table as a DataFrame. RunError if pandas is missing."""
        return frame_of(self.rows())

    @cached_property
    def _shown(self) -> str:
        return self.text

    def in_language(self, language: str) -> str:
        """The text in a language; in English where the result has no other."""
        return self._shown

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        """The text, for the prompt of Python."""
        return self._shown

    def _repr_html_(self) -> str:
        """The result in a notebook: its text on the page that the command's --html writes, in a frame of its own."""
        from shardwright.report.answer_page import answer_page

        return framed(answer_page(type(self).__name__, "", self.to_dict(), text=self._shown))


def framed(page: str) -> str:
    """A whole page as a part of a notebook's page, apart from its styles and scripts."""
    return f'<iframe srcdoc="{escape(page)}" style="{_FRAME}" title="Shardwright"></iframe>'


def frame_of(rows: list[dict[str, Any]]) -> "DataFrame":
    """Rows as a DataFrame. RunError if pandas is missing."""
    try:
        import pandas
    except ImportError:
        raise RunError(
            say(
                "frame() needs pandas, which is not installed: `pip install pandas`; rows() gives the same as a list "
                "of dictionaries"
            )
        ) from None
    return pandas.DataFrame(rows)
