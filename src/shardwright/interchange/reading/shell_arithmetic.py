"""The value of an arithmetic expression of a shell: whole numbers, names and operators."""

import operator
import re
from collections.abc import Callable, Mapping

from shardwright.config.fault_gathering_reader import signed, whole
from shardwright.config.phrase import say
from shardwright.interchange.reading.shell_words import ShellFault

_ARITHMETIC_TOKEN = re.compile(
    r"\s*(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!?:&|^]|[0-9]+(?:[xX#][0-9A-Za-z]+)?|[A-Za-z_]\w*)"
)
# Operators by precedence, the weakest first.
_PRECEDENCE = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
# Operators that change a variable: NAME=, NAME+=, NAME++, ++NAME, and those of an element NAME[INDEX].
_CHANGED = re.compile(
    r"(?<!\w)([A-Za-z_]\w{0,99})(?:\[[^\]]{0,99}\])?\s{0,9}(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))"
    r"|(?:\+\+|--)\s{0,9}([A-Za-z_]\w{0,99})"
)
_LARGEST = 1 << 63
_MOST_CHOICES = 20


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq,
    "|": operator.or_, "^": operator.xor, "&": operator.and_, "<<": operator.lshift, ">>": operator.rshift,
    "!=": operator.ne, "&&": lambda a, b: int(bool(a and b)), "||": lambda a, b: int(bool(a or b)),
}  # fmt: skip


def changed_names(text: str) -> list[str]:
    """The variables that an arithmetic expression changes."""
    return [before or behind for before, behind in _CHANGED.findall(text)]


class UnreadExpressionError(ShellFault):
    """An expression has what is not computed here, such as an element of an array."""


class UnknownOperand(ShellFault):
    """A variable of an expression has no number; `name` is that of the variable."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def _not_computed(text: str) -> str:
    """The fault of an expression that has no value."""
    return say("$(( {text} )) can't be computed; give its value with --set", text=text[:60])


class Arithmetic:
    """An arithmetic expression of whole numbers and names, whose `values` are those of variables."""

    def __init__(self, text: str, values: Mapping[str, object]) -> None:
        self.values, self.tokens, at = values, list[str](), 0
        text = text.replace('"', "").strip()  # quotes are removed, as bash does
        while at < len(text):
            token_match = _ARITHMETIC_TOKEN.match(text, at)
            if not token_match or len(self.tokens) > 500:
                raise UnreadExpressionError(_not_computed(text))
            self.tokens.append(token_match[1])
            at = token_match.end()
        self.at, self.text = 0, text

    def value(self) -> int:
        """The value. Raises ShellFault."""
        total = self._choice()
        if self.at < len(self.tokens):
            self._fail()
        return total

    def _choice(self, depth: int = 0) -> int:
        """The value of an expression, which may be CONDITION ? VALUE : VALUE."""
        condition = self._level(0)
        if self.at >= len(self.tokens) or self.tokens[self.at] != "?":
            return condition
        if depth > _MOST_CHOICES:
            self._fail()
        self._next_token()
        values = [self._choice(depth + 1)]
        if self._next_token() != ":":
            self._fail()
        values.append(self._choice(depth + 1))
        return values[0] if condition else values[1]

    def _fail(self) -> None:
        raise UnreadExpressionError(_not_computed(self.text))

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
            inner = self._choice()
            if self._next_token() != ")":
                self._fail()
            return inner
        if token in ("-", "+", "!"):
            value = self._atom()
            return {"-": -value, "+": value}.get(token, int(not value))
        if token[0].isdecimal():
            return self._literal(token)
        text = self.values.get(token, "")
        number = signed(text.strip()) if isinstance(text, str) else None
        if number is None:
            raise UnknownOperand(
                token,
                say("$(( {text} )) needs {name}; give it with --set {name}=VALUE", text=self.text[:60], name=token),
            )
        return number

    def _literal(self, token: str) -> int:
        """The value of a literal: 16, octal 020, hexadecimal 0x10, or 2#10000 with its base before it."""
        base, mark, digits = token.partition("#")
        if token[0] == "0" and token[1:2] in ("x", "X"):
            base, digits = "16", token[2:]
        elif not mark:
            base, digits = "8" if token[0] == "0" and len(token) > 1 else "10", token
        if digits.isdecimal() and base == "10":
            literal = whole(digits)
            return _LARGEST if literal is None else literal
        try:
            value = int(digits, whole(base) or 0) if len(digits) < 20 and 2 <= (whole(base) or 0) <= 36 else None
        except ValueError:
            value = None
        if value is None:
            self._fail()
        return min(value or 0, _LARGEST)

    def _apply(self, sign: str, a: int, b: int) -> int:
        if sign in ("/", "%") and b == 0:
            raise ShellFault(say("$(( {text} )) divides by 0; give its value with --set", text=self.text[:60]))
        is_too_high = sign in ("**", "<<", ">>") and not 0 <= b <= 63
        if is_too_high or abs(result := int(OPERATIONS[sign](a, b))) > _LARGEST:
            raise ShellFault(_not_computed(self.text))
        return result
