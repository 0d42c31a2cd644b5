"""Values of a script's variables, and what its words become with them; nothing is run.

What nobody has set stays a mark with its name in the text (UNKNOWN), so that only a setting that matters and depends on
it has to be asked for.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardwright.config.other_systems.shell_words import ShellFault, ShellReader, Token, WordPiece
from shardwright.config.other_systems.whole_text import signed, whole

Value = str | list[str]

_OPEN, _CLOSE = "\ue000", "\ue001"  # of a mark; private characters, which no script has a use for
UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_ODD = re.compile(r"[^A-Za-z0-9_@*#?$!-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_MOST_TEXT, _MOST_DEEP = 1 << 20, 12


def mark(name: str) -> str:
    """The text of what is not known. It is one word for every shell that reads it again."""
    return f"{_OPEN}{_ODD.sub('_', name[:80])}{_CLOSE}"


def unknown_names(text: str) -> list[str]:
    """The unknown names on which a text depends."""
    return [name for name in dict.fromkeys(UNKNOWN.findall(text)) if name]


def readable(text: str) -> str:
    """A text with its marks as a script has them: $NAME."""
    return UNKNOWN.sub(lambda match: f"${match[1]}", text)


@dataclass
class Variables:
    """The variables that a script has set. `fixed` were given from outside and stay. `defaulted` are those of
    ${NAME:-default} that nobody set, with what was taken."""

    values: dict[str, Value] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    defaulted: dict[str, str] = field(default_factory=dict)
    expansions: set[str] = field(default_factory=set)  # names of marks that stand for no variable

    def is_made(self, name: str) -> bool:
        """True if what is not known is made by the script itself, and not left to its environment."""
        return name in self.values or name in self.expansions

    def put(self, name: str, value: Value, appends: bool = False) -> None:
        """Set one, or add to it."""
        if name in self.fixed:
            return
        old = self.values.get(name)
        if appends and old is not None:
            if isinstance(old, list):
                value = old + (value if isinstance(value, list) else [value])
            else:
                value = [old, *value] if isinstance(value, list) else old + value
        _check(sum(map(len, value)) if isinstance(value, list) else len(value))
        self.values[name] = value

    def doubt(self, name: str, appends: bool) -> None:
        """From here on a variable has a value that is not known, or has more than is known."""
        old = self.values.get(name) if appends else None
        self.put(name, f" {mark(name)}" if isinstance(old, str) and old else mark(name), appends)

    def named(self, name: str, text: str) -> str:
        """A text that a variable gets. What a command prints has no name by which it could be given; the variable
        has."""
        return UNKNOWN.sub(lambda match: mark(name) if match[1] in self.expansions else match[0], text)

    def unfollowed(self, what: str) -> str:
        """The value given for an expansion that is not followed, else its mark."""
        marked = mark(what)
        given = self.values.get(marked[1:-1])
        if isinstance(given, str):
            return given
        self.expansions.add(marked[1:-1])
        return marked

    def words_of(self, token: Token, deep: int = 0) -> list[str]:
        """A word with its expansions: cut at blanks where they are not quoted. "$@" of nothing is no word."""
        words: list[str] = []
        current: str | None = None
        vanishes = False
        for piece in token.pieces:
            values = self._values(piece, deep)
            vanishes = vanishes or (not values and piece.quoted)
            for number, (text, splits) in enumerate(values):
                if number:
                    words += [] if current is None else [current]
                    current = None
                if not splits:
                    current = (current or "") + text
                    continue
                parts = text.split()
                if text[:1].isspace() and current is not None:
                    words.append(current)
                    current = None
                for place, part in enumerate(parts):
                    if place:
                        words.append(current or "")
                        current = None
                    current = (current or "") + part
                if parts and text[-1:].isspace():
                    words.append(current or "")
                    current = None
            _check(sum(map(len, words)) + len(current or ""))
        if current is not None and not (vanishes and not current):
            words.append(current)
        return words

    def text_of(self, token: Token, deep: int = 0) -> str:
        """A word as one text, as in an assignment."""
        joined = "".join(" ".join(text for text, _ in self._values(piece, deep)) for piece in token.pieces)
        _check(len(joined))
        return joined

    def document_of(self, text: str) -> str:
        """A here-document with its expansions."""
        reader = ShellReader('"' + text.replace('"', '\\"') + '"')
        return self.text_of(Token(1, pieces=tuple(reader.quoted())))

    def _values(self, piece: WordPiece, deep: int) -> list[tuple[str, bool]]:
        """The texts of a piece, and whether they are cut at blanks; several of an array."""
        if piece.kind == "text":
            return [(piece.text, False)]
        if deep > _MOST_DEEP:
            raise ShellFault(f"expansions more than {_MOST_DEEP} levels deep; set the variable plainly")
        if piece.kind == "arithmetic":
            return [(self.arithmetic(piece.text, deep), False)]
        if piece.kind == "command":
            return [(self._command(piece.text), not piece.quoted)]
        return [(text, not piece.quoted) for text in self._variable(piece.text, piece.quoted, deep)]

    def _command(self, text: str) -> str:
        """The output of a command: known for pwd alone."""
        return "." if text.strip() == "pwd" else self.unfollowed(f"({' '.join(text.split())})")

    def _variable(self, text: str, quoted: bool, deep: int) -> list[str]:
        name_match = _NAME.match(text)
        if not name_match or (text.startswith(("#", "!")) and len(text) > 1):
            return [self.unfollowed(f"{{{text}}}")]
        name, rest = name_match[0], text[name_match.end() :]
        value = self.values.get(name)
        if name in ("@", "*") and value is None:  # nobody gives the script any words
            return [""] if name == "*" and quoted else []
        if rest.startswith("["):
            value = value.split() if isinstance(value, str) and name in self.fixed else value  # an array, as one text
            index, _, rest = rest[1:].partition("]")
            value = _element(value, index, quoted)
        is_empty = value is None or (rest.startswith(":") and value in ("", []))
        sign, other = (rest[:2], rest[2:]) if rest.startswith(":") else (rest[:1], rest[1:])
        kind = sign.removeprefix(":")
        if not rest:
            return _listed(value if value is not None else mark(name))
        if kind in ("-", "="):
            if not is_empty:
                return _listed(value)
            default = self._expanded(other, deep)
            self.defaulted.setdefault(name, readable(default))
            return [default]
        if kind == "+":
            return [""] if is_empty else [self._expanded(other, deep)]
        if kind == "?":
            return _listed(mark(name) if is_empty else value)
        return [self.unfollowed(f"{{{text}}}")]

    def _expanded(self, text: str, deep: int) -> str:
        tokens = [token for token in ShellReader(text).read() if not token.operator]
        return " ".join(self.text_of(token, deep + 1) for token in tokens)

    def arithmetic(self, text: str, deep: int = 0) -> str:
        """The value of $(( )): a whole number as text; a mark where a name is not known."""
        plain = "".join(
            " ".join(one for one, _ in self._values(piece, deep + 1)) if piece else " " for piece in _pieces_of(text)
        )
        if names := unknown_names(plain):
            return mark(names[0])
        return str(_Sum(plain, self).value())


def _pieces_of(text: str) -> Iterator[WordPiece | None]:
    """The pieces of arithmetic, whose brackets and comparisons are no operators of the shell."""
    reader = ShellReader(text)
    while reader.at < len(text):
        if text[reader.at] in "$`":
            yield reader.expansion(quoted=True)
        else:
            yield WordPiece("text", text[reader.at], True)
            reader.at += 1


def _element(value: Value | None, index: str, quoted: bool) -> Value | None:
    if value is None:
        return [] if index in ("@", "*") else None
    values = [value] if isinstance(value, str) else value
    if index in ("@", "*"):
        return " ".join(values) if index == "*" and quoted else values
    place = whole(index)
    return values[place] if place is not None and place < len(values) else None


def _listed(value: Value | None) -> list[str]:
    return list(value) if isinstance(value, list) else [value or ""]


def _check(length: int) -> None:
    if length > _MOST_TEXT:
        raise ShellFault(f"a word of more than {_MOST_TEXT:,} characters; check that it is the launch script")


_SUM = re.compile(r"\s*(\*\*|<=|>=|==|!=|&&|\|\||[-+*/%()<>!]|[0-9]+|[A-Za-z_]\w*)")
_BINDS = (("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("+", "-"), ("*", "/", "%"), ("**",))
_LARGEST = 1 << 63


_APPLIED: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&&": lambda a, b: int(bool(a and b)), "||": lambda a, b: int(bool(a or b)),
}  # fmt: skip


class _Sum:
    """One arithmetic expression, of whole numbers and names."""

    def __init__(self, text: str, variables: Variables) -> None:
        self.variables, self.tokens, at = variables, list[str](), 0
        text = text.strip()
        while at < len(text):
            token_match = _SUM.match(text, at)
            if not token_match or len(self.tokens) > 500:
                raise ShellFault(f"$(( {text[:60]} )) can't be computed; give its value with --set")
            self.tokens.append(token_match[1])
            at = token_match.end()
        self.at, self.text = 0, text

    def value(self) -> int:
        total = self._level(0)
        if self.at < len(self.tokens):
            self._fail()
        return total

    def _fail(self) -> None:
        raise ShellFault(f"$(( {self.text[:60]} )) can't be computed; give its value with --set")

    def _take(self) -> str:
        if self.at >= len(self.tokens):
            self._fail()
        self.at += 1
        return self.tokens[self.at - 1]

    def _level(self, level: int) -> int:
        if level == len(_BINDS):
            return self._atom()
        total = self._level(level + 1)
        while self.at < len(self.tokens) and self.tokens[self.at] in _BINDS[level]:
            sign = self._take()
            total = self._apply(sign, total, self._level(level + 1))
        return total

    def _atom(self) -> int:
        token = self._take()
        if token == "(":
            inner = self._level(0)
            if self._take() != ")":
                self._fail()
            return inner
        if token in ("-", "+", "!"):
            value = self._atom()
            return {"-": -value, "+": value}.get(token, int(not value))
        if token.isdecimal():
            literal = whole(token)
            return _LARGEST if literal is None else literal
        text = self.variables.values.get(token, "")
        number = signed(text.strip()) if isinstance(text, str) else None
        if number is None:
            raise ShellFault(f"$(( {self.text[:60]} )) needs {token}; give it with --set {token}=VALUE")
        return number

    def _apply(self, sign: str, a: int, b: int) -> int:
        if sign in ("/", "%") and b == 0:
            raise ShellFault(f"$(( {self.text[:60]} )) divides by 0; give its value with --set")
        if sign == "**" and (b < 0 or b > 63):
            self._fail()
        result = int(_APPLIED[sign](a, b))
        if abs(result) > _LARGEST:
            self._fail()
        return result


_COMPARED = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


def is_true(words: list[str], variables: Variables) -> bool | None:
    """The truth of `[ ... ]`; None if it is unknown. Files are there, and what nobody set is empty."""
    if "||" in words or "-o" in words:
        at = next(n for n, word in enumerate(words) if word in ("||", "-o"))
        either = (is_true(words[:at], variables), is_true(words[at + 1 :], variables))
        return True if True in either else None if None in either else False
    if "&&" in words or "-a" in words:
        at = next(n for n, word in enumerate(words) if word in ("&&", "-a"))
        both = (is_true(words[:at], variables), is_true(words[at + 1 :], variables))
        return False if False in both else None if None in both else True
    if words[:1] == ["!"]:
        truth = is_true(words[1:], variables)
        return None if truth is None else not truth
    bare = [UNKNOWN.sub("", word) for word in words]
    if len(words) <= 1:
        return bool(bare and bare[0])
    if len(words) == 2:
        return {"-n": bool(bare[1]), "-z": not bare[1], "-v": words[1] in variables.values}.get(
            words[0], True if words[0] in ("-f", "-d", "-e", "-s", "-r", "-x") else None
        )
    if len(words) != 3 or any(map(unknown_names, (words[0], words[2]))):
        return None
    if words[1] in ("=", "==", "!="):
        return fnmatchcase(words[0], words[2][:200]) == (words[1] != "!=")
    if words[1] in _COMPARED and None not in (signed(words[0]), signed(words[2])):
        return bool(_Sum(f"{words[0]} {_COMPARED[words[1]]} {words[2]}", variables).value())
    return None
