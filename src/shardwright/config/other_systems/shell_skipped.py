"""The names that an unfollowed part of a script would set: a loop, a function, a branch whose condition is unknown.

A variable that it would set has no value that is known from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.config.other_systems.shell_words import Token

DECLARING = ("export", "declare", "local", "readonly", "typeset")
READING = ("read", "mapfile", "readarray", "getopts")
_OF_FUNCTIONS = ("local", "declare", "typeset")


@dataclass
class SkippedPart:
    """Variables by their names, and whether each is only added to; and the commands that it would run."""

    sets: dict[str, bool] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)

    def put(self, name: str, appends: bool) -> None:
        """A variable that is set, or added to."""
        self.sets[name] = appends and self.sets.get(name, True)

    def add(self, other: "SkippedPart") -> None:
        """All of another part."""
        for name, appends in other.sets.items():
            self.put(name, appends)
        self.calls |= other.calls

    def command(self, tokens: Sequence[Token]) -> None:
        """A command with the assignments before it."""
        rest = [token for token in tokens if token.pieces]
        first = rest[0].plain if rest else ""
        if first in _OF_FUNCTIONS:
            return
        if first in READING:
            for name in names_of(rest[1:]):
                self.put(name, False)
        for token in rest[1:] if first in DECLARING else rest:
            assignment = assigned(token)
            if assignment is None:
                self.calls.add(token.plain)
                return
            self.put(*assignment)


def assigned(token: Token) -> tuple[str, bool] | None:
    """The name that a word assigns, and whether it adds to what is there."""
    if not token.pieces or token.pieces[0].kind != "text" or token.pieces[0].quoted:
        return None
    name, equals, _ = token.pieces[0].text.partition("=")
    appends = name.endswith("+")
    name = name.removesuffix("+")
    return (name, appends) if equals and name.isascii() and name.isidentifier() else None


def names_of(tokens: Sequence[Token]) -> list[str]:
    """The words that are names of variables."""
    return [token.plain for token in tokens if token.plain.isascii() and token.plain.isidentifier()]
