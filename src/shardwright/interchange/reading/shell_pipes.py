"""Texts that commands of a script print and read, as far as they are known: pipes, here-documents, and $(...)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.interchange.reading.shell_filters import filtered
from shardwright.interchange.reading.shell_outputs import first_output

_MOST_TEXT = 1 << 20
# Commands that change a text which they read, if they name no file.
FILTERS = (
    "awk",
    "bc",
    "cat",
    "cut",
    "egrep",
    "gawk",
    "grep",
    "head",
    "paste",
    "rev",
    "sed",
    "sort",
    "tac",
    "tail",
    "tr",
    "uniq",
    "wc",
    "xargs",
)
# Commands that print nothing, or nothing that a script uses.
SILENT = (
    ":",
    "[",
    "[[",
    "break",
    "cd",
    "continue",
    "eval",
    "exit",
    "export",
    "false",
    "let",
    "mapfile",
    "mkdir",
    "read",
    "readarray",
    "return",
    "set",
    "shift",
    "shopt",
    "sleep",
    "source",
    ".",
    "test",
    "true",
    "unset",
    "wait",
)


@dataclass
class Printed:
    """Output of some commands: the texts of each, and False if one of them is unknown."""

    parts: list[str] = field(default_factory=list)
    is_known: bool = True
    num_chars: int = 0

    @property
    def text(self) -> str | None:
        """All that is printed; None if a part is unknown."""
        return "".join(self.parts) if self.is_known else None

    def write(self, text: str | None) -> None:
        """Add what a command prints; None if it is unknown."""
        self.num_chars += len(text or "")
        if text is None or self.num_chars > _MOST_TEXT:
            self.is_known = False
        else:
            self.parts.append(text)


@dataclass
class Given:
    """A text that commands read, of which `rest` is left; None if it is unknown."""

    rest: str | None

    def all(self) -> str | None:
        """All that is left, which is taken."""
        text, self.rest = self.rest, "" if self.rest is not None else None
        return text

    def line(self) -> str | None:
        """The next line with its end, which is taken; empty at the end of the text, None if it is unknown."""
        if self.rest is None:
            return None
        line, end, self.rest = self.rest.partition("\n")
        return line + end


def printed_by(words: Sequence[str], given: Given | None) -> tuple[str | None, bool | None]:
    """Output of a command, and True if it succeeds; None for what is unknown. `given` is what it reads, if known."""
    if words[0] in FILTERS:
        text = given.all() if given is not None else None
        result = None if text is None else filtered(words, text)
        return (None, None) if result is None else result
    text = first_output(words)
    return text, None if text is None else True
