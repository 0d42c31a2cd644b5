"""The variables that a skipped part of a script would set: a loop, a function, a branch with an unknown condition.

The value of such a variable is unknown from there on.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.interchange.reading.shell_arithmetic import changed_names
from shardwright.interchange.reading.shell_regexes import MATCHED, REGEX
from shardwright.interchange.reading.shell_words import Token, WordPiece

DECLARING = ("export", "declare", "local", "readonly", "typeset")
READING = ("read", "mapfile", "readarray", "getopts")
LOCAL = ("local", "declare", "typeset")  # what a function declares so ends with it
CASE_OPTION = " nocasematch"  # the name of a value that no variable has: "1" if letters of another case fit
_DEFAULTED = re.compile(r"^([A-Za-z_]\w*):?=")
_ELEMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[")
_ELEMENT_END = re.compile(r"\]\+?=")


@dataclass
class SkippedPart:
    """The variables that a part sets (`sets`), with True if it only appends to them; the commands that it calls; and,
    if it is a function, the words of its body."""

    sets: dict[str, bool] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)  # of `sets`, those that would hold options of a command
    body: list[Token] = field(default_factory=list)  # of a function

    def put(self, name: str, appends: bool) -> None:
        """Record a variable that is set or appended to."""
        self.sets[name] = appends and self.sets.get(name, True)

    def add(self, other: "SkippedPart") -> None:
        """Record everything of another part."""
        for name, appends in other.sets.items():
            self.put(name, appends)
        self.calls |= other.calls
        self.options |= other.options

    def command(self, tokens: Sequence[Token]) -> None:
        """Record a command and the assignments before it."""
        words = [token for token in tokens if token.pieces]
        first = words[0].plain if words else ""
        for name in names_changed(words):
            self.put(name, False)
        if first == "local":
            return
        if first in READING:
            for name in names_of(words[1:]):
                self.put(name, False)
        for token in words[1:] if first in DECLARING else words:
            assignment = assigned(token)
            if assignment is None and first in DECLARING:
                continue
            if assignment is None:
                self.calls.add(token.plain)
                return
            name, appends = assignment
            self.put(name, appends or _begins_with(token, name))
            if "".join(piece.text for piece in token.pieces).partition("=")[2].lstrip(" \\\n\t").startswith("--"):
                self.options.add(name)


def assigned(token: Token) -> tuple[str, bool] | None:
    """The name that a word such as NAME=VALUE assigns, and True for NAME+=VALUE and for an element of an array; None if
    it is no assignment."""
    if not token.pieces or token.pieces[0].kind != "text" or token.pieces[0].quoted:
        return None
    if element := assigned_element(token):
        return element.name, True
    name, equals, _ = token.pieces[0].text.partition("=")
    appends = name.endswith("+")
    name = name.removesuffix("+")
    return (name, appends) if equals and is_name(name) else None


@dataclass(frozen=True)
class AssignedElement:
    """An assignment NAME[INDEX]=VALUE, or NAME[INDEX]+=VALUE, by the pieces of its words."""

    name: str
    index: tuple[WordPiece, ...]
    value: tuple[WordPiece, ...]
    appends: bool


def assigned_element(token: Token) -> AssignedElement | None:
    """The element of an array that a word assigns; None if it assigns none."""
    first = token.pieces[0]
    begin = _ELEMENT.match(first.text) if first.kind == "text" and not first.quoted else None
    if begin is None:
        return None
    inside: list[WordPiece] = []
    for place, piece in enumerate(token.pieces):
        text = piece.text[begin.end() :] if place == 0 else piece.text
        end = _ELEMENT_END.search(text) if piece.kind == "text" and not piece.quoted else None
        if end is None:
            inside.append(WordPiece(piece.kind, text, piece.quoted))
            continue
        inside.append(WordPiece("text", text[: end.start()], False))
        value = (WordPiece("text", text[end.end() :], False), *token.pieces[place + 1 :])
        is_empty = not any(one.text for one in inside)
        return None if is_empty else AssignedElement(begin[1], tuple(inside), value, "+" in end[0])
    return None


def _begins_with(token: Token, name: str) -> bool:
    """True if an assignment begins with the variable's own value, NAME="$NAME more", which appends to it."""
    first, *others = token.pieces
    second = next((piece for piece in others if piece.text), None)
    return first.text == f"{name}=" and second is not None and (second.kind, second.text) == ("variable", name)


def names_of(tokens: Sequence[Token]) -> list[str]:
    """The words that are valid names of variables."""
    return [token.plain for token in tokens if is_name(token.plain)]


def is_name(word: str) -> bool:
    """True for a valid name of a variable."""
    return word.isascii() and word.isidentifier()


def _defaulted(text: str) -> list[str]:
    """The variable that ${NAME:=VALUE} sets."""
    return [match[1]] if (match := _DEFAULTED.match(text)) else []


_CHANGES: dict[str, Callable[[str], list[str]]] = {"arithmetic": changed_names, "variable": _defaulted}


def names_changed(words: Sequence[Token]) -> list[str]:
    """The variables that a command changes by arithmetic, by `let`, `printf -v` or ${NAME:=VALUE}, or that it declares
    in quotes: export "NAME=VALUE"."""
    names = [
        name
        for token in words
        for piece in token.pieces
        for name in (_CHANGES[piece.kind](piece.text) if piece.kind in _CHANGES else ())
    ]
    texts = ["".join(piece.text for piece in token.pieces) for token in words]
    first = texts[0] if texts else ""
    if first == "let":
        names += [name for text in texts[1:] for name in changed_names(text)]
    if first == "[[" and REGEX in texts:
        names.append(MATCHED)
    if first == "shopt" and "nocasematch" in texts:
        names.append(CASE_OPTION)
    if first == "printf" and texts[1:2] == ["-v"]:
        names += texts[2:3]
    if first in DECLARING:
        quoted = [text for token, text in zip(words, texts, strict=True) if "=" in text and not assigned(token)]
        names += [name for text in quoted if is_name(name := text.partition("=")[0])]
    return names
