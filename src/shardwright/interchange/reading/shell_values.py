"""The values of a script's variables, and the expansion of its words with them; nothing is run.

A variable that nobody has set stays in the text as a mark with its name (UNKNOWN), so that the user has to give it only
if a setting with an effect depends on it.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardwright.config.fault_gathering_reader import signed, whole
from shardwright.interchange.reading.shell_words import ShellFault, ShellReader, Token, WordPiece

Value = str | list[str]

_OPEN, _CLOSE = "\ue000", "\ue001"  # around the name in a mark: private-use characters, which no script contains
UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_ODD = re.compile(r"[^A-Za-z0-9_@*#?$!-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_MOST_TEXT, _MOST_LEVELS = 1 << 20, 12


def mark(name: str) -> str:
    """The text for an unknown value. It stays one word if a shell reads it again."""
    return f"{_OPEN}{_ODD.sub('_', name[:80])}{_CLOSE}"


def unknown_names(text: str) -> list[str]:
    """The names of the marks in a text, each once."""
    return [name for name in dict.fromkeys(UNKNOWN.findall(text)) if name]


def readable(text: str) -> str:
    """A text with its marks written as in a script: $NAME."""
    return UNKNOWN.sub(lambda match: f"${match[1]}", text)


@dataclass
class Variables:
    """The variables of a script. `fixed` names were given from outside and keep their values. `defaulted` maps unset
    variables in ${NAME:-default} to the defaults that were taken."""

    values: dict[str, Value] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    defaulted: dict[str, str] = field(default_factory=dict)
    expansions: set[str] = field(default_factory=set)  # names of marks for anything but variables, such as output

    def is_made(self, name: str) -> bool:
        """True if the script itself makes an unknown value; False if it comes from the environment."""
        return name in self.values or name in self.expansions

    def texts(self) -> dict[str, str]:
        """The variables that are no arrays."""
        return {name: value for name, value in self.values.items() if isinstance(value, str)}

    def restore(self, name: str, values: Mapping[str, Value]) -> None:
        """Give a variable the value that it has in `values`, or none."""
        if name in values:
            self.values[name] = values[name]
        else:
            self.values.pop(name, None)

    def put(self, name: str, value: Value, appends: bool = False) -> None:
        """Set a variable, or append to it."""
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
        """Make the value of a variable unknown, or append an unknown value to it."""
        old = self.values.get(name) if appends else None
        self.put(name, f" {mark(name)}" if isinstance(old, str) and old else mark(name), appends)

    def with_own_mark(self, name: str, text: str) -> str:
        """The text with the variable's mark in place of marks for the output of commands, since the user can give a
        value only for a variable."""
        return UNKNOWN.sub(lambda match: mark(name) if match[1] in self.expansions else match[0], text)

    def unfollowed(self, text: str) -> str:
        """The value that was given for an expansion that is not followed, else its mark."""
        marked = mark(text)
        given = self.values.get(marked[1:-1])
        if isinstance(given, str):
            return given
        self.expansions.add(marked[1:-1])
        return marked

    def words_of(self, token: Token, depth: int = 0) -> list[str]:
        """The expanded words of a token. Unquoted expansions are split at blanks; "$@" without arguments is no word."""
        words: list[str] = []
        current: str | None = None
        can_vanish = False
        for piece in token.pieces:
            values = self._values(piece, depth)
            can_vanish = can_vanish or (not values and piece.quoted)
            for text_index, (text, is_split) in enumerate(values):
                if text_index:
                    words += [] if current is None else [current]
                    current = None
                if not is_split:
                    current = (current or "") + text
                    continue
                parts = text.split()
                if text[:1].isspace() and current is not None:
                    words.append(current)
                    current = None
                for part_index, part in enumerate(parts):
                    if part_index:
                        words.append(current or "")
                        current = None
                    current = (current or "") + part
                if parts and text[-1:].isspace():
                    words.append(current or "")
                    current = None
            _check(sum(map(len, words)) + len(current or ""))
        if current is not None and not (can_vanish and not current):
            words.append(current)
        return words

    def text_of(self, token: Token, depth: int = 0) -> str:
        """The expanded token as one text, as in an assignment."""
        joined = "".join(" ".join(text for text, _ in self._values(piece, depth)) for piece in token.pieces)
        _check(len(joined))
        return joined

    def document_of(self, text: str) -> str:
        """The expanded text of a here-document."""
        reader = ShellReader('"' + text.replace('"', '\\"') + '"')
        return self.text_of(Token(1, pieces=tuple(reader.quoted())))

    def _values(self, piece: WordPiece, depth: int) -> list[tuple[str, bool]]:
        """The texts of a piece, each with True if it is split at blanks; an array may have several texts."""
        if piece.kind == "text":
            return [(piece.text, False)]
        if depth > _MOST_LEVELS:
            raise ShellFault(f"expansions more than {_MOST_LEVELS} levels deep; set the variable plainly")
        if piece.kind == "arithmetic":
            return [(self.arithmetic(piece.text, depth), False)]
        if piece.kind == "command":
            return [(self._command(piece.text), not piece.quoted)]
        return [(text, not piece.quoted) for text in self._variable(piece.text, piece.quoted, depth)]

    def _command(self, text: str) -> str:
        """The output of a command, which is known only for pwd."""
        return "." if text.strip() == "pwd" else self.unfollowed(f"({' '.join(text.split())})")

    def _variable(self, text: str, quoted: bool, depth: int) -> list[str]:
        name_match = _NAME.match(text)
        if not name_match or (text.startswith(("#", "!")) and len(text) > 1):
            return [self.unfollowed(f"{{{text}}}")]
        name, modifier = name_match[0], text[name_match.end() :]
        value = self.values.get(name)
        if name in ("@", "*") and value is None:  # the script has no arguments
            return [""] if name == "*" and quoted else []
        if modifier.startswith("["):
            # An array is given from outside as one text.
            value = value.split() if isinstance(value, str) and name in self.fixed else value
            index, _, modifier = modifier[1:].partition("]")
            value = _element(value, index, quoted)
        is_empty = value is None or (modifier.startswith(":") and value in ("", []))
        sign, word = (modifier[:2], modifier[2:]) if modifier.startswith(":") else (modifier[:1], modifier[1:])
        kind = sign.removeprefix(":")
        if not modifier:
            return _as_list(value if value is not None else mark(name))
        if kind in ("-", "="):
            if not is_empty:
                return _as_list(value)
            default = self._expanded(word, depth)
            self.defaulted.setdefault(name, readable(default))
            return [default]
        if kind == "+":
            return [""] if is_empty else [self._expanded(word, depth)]
        if kind == "?":
            return _as_list(mark(name) if is_empty else value)
        return [self.unfollowed(f"{{{text}}}")]

    def _expanded(self, text: str, depth: int) -> str:
        tokens = [token for token in ShellReader(text).read() if not token.operator]
        return " ".join(self.text_of(token, depth + 1) for token in tokens)

    def arithmetic(self, text: str, depth: int = 0) -> str:
        """The value of $(( )): a whole number as text; a mark if a name in it is unknown."""
        plain = "".join(
            " ".join(piece_text for piece_text, _ in self._values(piece, depth + 1)) if piece else " "
            for piece in _pieces_of(text)
        )
        if names := unknown_names(plain):
            return mark(names[0])
        return str(_Arithmetic(plain, self).value())


def _pieces_of(text: str) -> Iterator[WordPiece | None]:
    """The pieces of an arithmetic expression, in which brackets and comparisons are no operators of the shell."""
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
    position = whole(index)
    return values[position] if position is not None and position < len(values) else None


def _as_list(value: Value | None) -> list[str]:
    return list(value) if isinstance(value, list) else [value or ""]


def _check(length: int) -> None:
    if length > _MOST_TEXT:
        raise ShellFault(f"a word of more than {_MOST_TEXT:,} characters; check that it is the launch script")


_ARITHMETIC_TOKEN = re.compile(r"\s*(\*\*|<=|>=|==|!=|&&|\|\||[-+*/%()<>!]|[0-9]+|[A-Za-z_]\w*)")
# Operators by precedence, the weakest first.
_PRECEDENCE = (("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("+", "-"), ("*", "/", "%"), ("**",))
_LARGEST = 1 << 63


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&&": lambda a, b: int(bool(a and b)), "||": lambda a, b: int(bool(a or b)),
}  # fmt: skip


class _Arithmetic:
    """An arithmetic expression of whole numbers and names."""

    def __init__(self, text: str, variables: Variables) -> None:
        self.variables, self.tokens, at = variables, list[str](), 0
        text = text.strip()
        while at < len(text):
            token_match = _ARITHMETIC_TOKEN.match(text, at)
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

    def _next_token(self) -> str:
        if self.at >= len(self.tokens):
            self._fail()
        self.at += 1
        return self.tokens[self.at - 1]

    def _level(self, level: int) -> int:
        if level == len(_PRECEDENCE):
            return self._atom()
        total = self._level(level + 1)
        while self.at < len(self.tokens) and self.tokens[self.at] in _PRECEDENCE[level]:
            sign = self._next_token()
            total = self._apply(sign, total, self._level(level + 1))
        return total

    def _atom(self) -> int:
        token = self._next_token()
        if token == "(":
            inner = self._level(0)
            if self._next_token() != ")":
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
        result = int(_OPERATIONS[sign](a, b))
        if abs(result) > _LARGEST:
            self._fail()
        return result


_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


def is_true(words: list[str], variables: Variables) -> bool | None:
    """The truth of `[ ... ]`; None if it is unknown. Tested files count as present, and unset variables as empty."""
    if "||" in words or "-o" in words:
        place = next(index for index, word in enumerate(words) if word in ("||", "-o"))
        sides = (is_true(words[:place], variables), is_true(words[place + 1 :], variables))
        return True if True in sides else None if None in sides else False
    if "&&" in words or "-a" in words:
        place = next(index for index, word in enumerate(words) if word in ("&&", "-a"))
        both_sides = (is_true(words[:place], variables), is_true(words[place + 1 :], variables))
        return False if False in both_sides else None if None in both_sides else True
    if words[:1] == ["!"]:
        truth = is_true(words[1:], variables)
        return None if truth is None else not truth
    known_parts = [UNKNOWN.sub("", word) for word in words]
    if len(words) <= 1:
        return bool(known_parts and known_parts[0])
    if len(words) == 2:
        return {"-n": bool(known_parts[1]), "-z": not known_parts[1], "-v": words[1] in variables.values}.get(
            words[0], True if words[0] in ("-f", "-d", "-e", "-s", "-r", "-x") else None
        )
    if len(words) != 3 or any(map(unknown_names, (words[0], words[2]))):
        return None
    if words[1] in ("=", "==", "!="):
        return fnmatchcase(words[0], words[2][:200]) == (words[1] != "!=")
    if words[1] in _COMPARISONS and None not in (signed(words[0]), signed(words[2])):
        return bool(_Arithmetic(f"{words[0]} {_COMPARISONS[words[1]]} {words[2]}", variables).value())
    return None
