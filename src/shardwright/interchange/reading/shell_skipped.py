"""The variables that a skipped part of a script would set: a loop, a function, a branch with an unknown condition.

The value of such a variable is unknown from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.interchange.reading.shell_words import Token

DECLARING = ("export", "declare", "local", "readonly", "typeset")
READING = ("read", "mapfile", "readarray", "getopts")
_OF_FUNCTIONS = ("local", "declare", "typeset")


@dataclass
class SkippedPart:
    """The variables that a part sets (`sets`), with True if it only appends to them; and the commands that it calls."""

    sets: dict[str, bool] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)

    def put(self, name: str, appends: bool) -> None:
        """Record a variable that is set or appended to."""
        self.sets[name] = appends and self.sets.get(name, True)

    def add(self, other: "SkippedPart") -> None:
        """Record everything of another part."""
        for name, appends in other.sets.items():
            self.put(name, appends)
        self.calls |= other.calls

    def command(self, tokens: Sequence[Token]) -> None:
        """Record a command and the assignments before it."""
        words = [token for token in tokens if token.pieces]
        first = words[0].plain if words else ""
        if first in _OF_FUNCTIONS:
            return
        if first in READING:
            for name in names_of(words[1:]):
                self.put(name, False)
        for token in words[1:] if first in DECLARING else words:
            assignment = assigned(token)
            if assignment is None:
                self.calls.add(token.plain)
                return
            self.put(*assignment)


def assigned(token: Token) -> tuple[str, bool] | None:
    """The name that a word such as NAME=VALUE assigns, and True for NAME+=VALUE; None if it is no assignment."""
    if not token.pieces or token.pieces[0].kind != "text" or token.pieces[0].quoted:
        return None
    name, equals, _ = token.pieces[0].text.partition("=")
    appends = name.endswith("+")
    name = name.removesuffix("+")
    return (name, appends) if equals and name.isascii() and name.isidentifier() else None


def names_of(tokens: Sequence[Token]) -> list[str]:
    """The words that are valid names of variables."""
    return [token.plain for token in tokens if token.plain.isascii() and token.plain.isidentifier()]
