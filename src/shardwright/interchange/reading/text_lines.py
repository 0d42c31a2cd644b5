"""The lines of a text, as sed, awk and their like take a text apart and print it."""

from collections.abc import Iterable


def lines_of(text: str) -> list[str]:
    """The lines of a text without their ends; none of an empty text."""
    return text.removesuffix("\n").split("\n") if text else []


def text_of_lines(lines: Iterable[str]) -> str:
    """A text of lines, each with its end."""
    return "".join(f"{line}\n" for line in lines)
