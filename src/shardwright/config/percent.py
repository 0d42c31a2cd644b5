"""Percentages for people: one way to write them, with a space as before any other unit."""

from string import Formatter
from typing import Any


def percent_text(share: float, form: str = ".1%") -> str:
    """A share as a percentage, in one of Python's forms that end with a percent sign.

    >>> percent_text(0.585), percent_text(-0.04, "+.0%")
    ('58.5 %', '-4 %')
    """
    return f"{format(share, form)[:-1]} %"


def whole_percent_text(share: float) -> str:
    """A share as a percentage without decimals: "58 %"."""
    return percent_text(share, ".0%")


class PercentFormatter(Formatter):
    """The filling of templates, in which shares with a form such as {share:.1%} are written by `percent_text`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """The text of one value in its form."""
        if format_spec.endswith("%"):
            return percent_text(value, format_spec)
        return str(super().format_field(value, format_spec))
