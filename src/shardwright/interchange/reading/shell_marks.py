"""Marks: what stands in a text for a value that is unknown, with the name of the variable that has it."""

import re

from shardwright.config.phrase import with_changed_texts

_OPEN, _CLOSE = "\ue000", "\ue001"  # around the name in a mark: private-use characters, which no script contains
UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
# Variables that have another value in each process: its rank, among all or on its node, or the number of its node.
RANK_NAME = re.compile(r"^\w{0,60}?(?:RANK|PROCID|LOCALID|NODEID|rank)$")
_ODD = re.compile(r"[^A-Za-z0-9_@*#?$!-]+")


def mark(name: str) -> str:
    """The text for an unknown value. It stays one word if a shell reads it again."""
    return f"{_OPEN}{_ODD.sub('_', name[:80])}{_CLOSE}"


def unknown_names(text: str) -> list[str]:
    """The names of the marks in a text, each once."""
    return [name for name in dict.fromkeys(UNKNOWN.findall(text)) if name]


def readable(text: str) -> str:
    """A text with its marks written as in a script: $NAME."""
    return with_changed_texts(text, lambda part: UNKNOWN.sub(lambda match: f"${match[1]}", part))
