"""The words of a shell script, split as POSIX shells and bash do, without running anything.

A line becomes words and operators. A word consists of pieces: literal text, and expansions (a variable, arithmetic, the
output of a command), each quoted or not. shell_values.py gives the expansions their values.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say

# Longer operators come before their beginnings.
OPERATORS = ("&&", "||", ";;&", ";;", ";&", "<<<", "<<-", "<<", ">>", ">&", "<&", "&>", "|&", "((", "))", ";", "&", "|",
             "<", ">", "(", ")", "\n")  # fmt: skip
_ENDS_WORD = " \t\r\n;&|<>()"
_BEFORE_COMMANDS = ("if", "elif", "while", "until", "then", "else", "do", "!", "{")
_MOST_WORDS = 100_000
_CASE = re.compile(r"case(?=\s)|esac(?![\w-])")
_BEFORE_CASE = re.compile(r"(?:^|[\n;&|(]|\b(?:then|do|else))\s*\Z")
# Brackets of expansions and their kinds; $[ ] is the older form of $(( )).
_BRACKETS = (
    ("$((", "))", "arithmetic"),
    ("$[", "]", "arithmetic"),
    ("$(", ")", "command"),
    ("${", "}", "variable"),
)

# The text in the quotes $'...', and an escape in it: octal, hexadecimal, Unicode, control, or one character.
_ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ANSI_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.)|(.))", re.DOTALL
)
_ANSI_CHARACTERS = {
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_PLAIN_ESCAPES = "\\'\"?"


class ShellFault(ValueError):  # noqa: N818 (a fault in the words of PlanError)
    """A part of a file that can't be read, described in one sentence."""


@dataclass(frozen=True)
class WordPiece:
    """A part of a word. `kind` is "text", or the kind of an expansion: "variable", "arithmetic", "command" or
    "process" (a command whose output is read like a file: <(...))."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True)
class Token:
    """A word of pieces, or an operator. `document` is the text of a here-document, whose words are expanded if
    `expands`: its end marker is not quoted. `descriptor` is the number before a redirection: 2 in 2>log."""

    line: int
    operator: str = ""
    pieces: tuple[WordPiece, ...] = ()
    document: str | None = None
    expands: bool = False
    descriptor: str = ""

    @property
    def plain(self) -> str:
        """The word if it is unquoted text without expansions, as keywords are; else empty."""
        is_plain = all(piece.kind == "text" and not piece.quoted for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces) if is_plain else ""


def _ansi_character(escape: re.Match[str]) -> str:
    """The character of an escape in $'...'. An unknown escape stays as it is written."""
    octal, hexadecimal, short, long, control, plain = escape.groups()
    if octal is not None:
        return chr(int(octal, 8) & 0xFF)
    if digits := hexadecimal or short or long:
        number = int(digits, 16)
        return chr(number) if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF else escape[0]
    if control is not None:
        return chr(ord(control) & 0x1F)
    return _ANSI_CHARACTERS.get(plain, plain if plain in _PLAIN_ESCAPES else escape[0])


class ShellReader:
    """A reader of one script, or of a string within it."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.line = text, 0, line
        self.tokens: list[Token] = []
        self._documents: list[tuple[int, bool, bool]] = []  # index of its end marker, cuts tabs, is quoted
        self._word_end = -1  # where the last word ends

    def read(self) -> list[Token]:
        """Read all words and operators. Raises ShellFault."""
        while self.at < len(self.text):
            if len(self.tokens) > _MOST_WORDS:
                raise ShellFault(
                    say("line {line}: more than {most:,} words; check the file", line=self.line, most=_MOST_WORDS)
                )
            self._next()
        self._read_documents()
        return self.tokens

    def _next(self) -> None:
        char = self.text[self.at]
        if char in " \t\r":
            self.at += 1
        elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
            self.at = self.text.index("\n", self.at) + 1
            self.line += 1
        elif char == "#":
            self.at = _end(self.text, self.at)
        elif char != "\n" and self._is_regex():
            self._word()
        elif self.text.startswith(("<(", ">("), self.at):
            self._process()
        else:
            operator = next((sign for sign in OPERATORS if self.text.startswith(sign, self.at)), "")
            if operator:
                self._operator(operator)
            else:
                self._word()

    def _process(self) -> None:
        """Read a command whose output stands for a file, as a word or as the end of one."""
        is_end = self._word_end == self.at and self.tokens and not self.tokens[-1].operator
        before = self.tokens.pop().pieces if is_end else ()
        line = self.line
        piece = WordPiece("process", self._bracketed("<(", ")"), False)
        self.tokens.append(Token(line, pieces=(*before, piece)))
        self._word_end = self.at

    def _operator(self, sign: str) -> None:
        if sign == "((" and not (self._begins_command() or self.tokens[-1].plain == "for"):
            sign = "("
        descriptor = self.tokens.pop().plain if sign[0] in "<>" and self._is_descriptor() else ""
        self.at += len(sign)
        if sign == "((":
            end = self.text.find("))", self.at)
            end = len(self.text) if end < 0 else end
            self.tokens.append(Token(self.line, pieces=(WordPiece("arithmetic", self.text[self.at : end], True),)))
            self.at = end + 2
            return
        self.tokens.append(Token(self.line, operator=sign, descriptor=descriptor))
        if sign == "\n":
            self.line += 1
            self._read_documents()

    def _is_descriptor(self) -> bool:
        """True if the digits directly before a redirection are a file descriptor, not a word of the command."""
        if not self.tokens or self._word_end != self.at or whole(self.tokens[-1].plain) is None:
            return False
        return not self._documents or self._documents[-1][0] != len(self.tokens) - 1

    def _begins_command(self) -> bool:
        if not self.tokens or self.tokens[-1].plain in _BEFORE_COMMANDS:
            return True
        return self.tokens[-1].operator in ("\n", ";", "&&", "||", "|", "&", "(", ")")  # the last: of a pattern of case

    def _is_regex(self) -> bool:
        """True if a regular expression begins here, whose brackets and bars are no operators."""
        return bool(self.tokens) and self.tokens[-1].plain == "=~"

    def _word(self) -> None:
        line, pieces = self.line, list[WordPiece]()
        is_regex, depth = self._is_regex(), 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if is_regex and (char in "()|" or (depth > 0 and char in " \t")):
                depth += (char == "(") - (char == ")")
                pieces.append(WordPiece("text", char, False))
                self.at += 1
            elif char in _ENDS_WORD:
                break
            else:
                pieces += self._piece()
        self.tokens.append(Token(line, pieces=tuple(pieces)))
        self._word_end = self.at
        previous_operator = self.tokens[-2].operator if len(self.tokens) > 1 else ""
        if previous_operator in ("<<", "<<-"):
            self._documents.append(
                (len(self.tokens) - 1, previous_operator == "<<-", any(piece.quoted for piece in pieces))
            )

    def word(self, keeps_quotes: bool = False) -> Token:
        """Read all of the text as one word, in which blanks and operators are text; single quotes, too, if
        `keeps_quotes`. Raises ShellFault."""
        line, pieces = self.line, list[WordPiece]()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _ENDS_WORD or (keeps_quotes and char == "'"):
                pieces.append(WordPiece("text", char, False))
                self.at += 1
            else:
                pieces += self._piece()
        return Token(line, pieces=tuple(pieces))

    def _piece(self) -> list[WordPiece]:
        char = self.text[self.at]
        if char == "\\":
            pair = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            if pair == "\n":
                self.line += 1
                return []
            return [WordPiece("text", pair, True)]
        if char == "'":
            return [WordPiece("text", self._until("'"), True)]
        if char == '"':
            return self.quoted()
        if self.text.startswith('$"', self.at):  # a text that a shell may translate
            self.at += 1
            return self.quoted()
        if char == "$" and self.text.startswith("$'", self.at):
            return [WordPiece("text", self._ansi_quoted(), True)]
        if char in "$`":
            return [self.expansion(quoted=False)]
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] not in _ENDS_WORD + "\\'\"$`":
            self.at += 1
        return [WordPiece("text", self.text[begin : self.at], False)]

    def _until(self, mark: str) -> str:
        end = self.text.find(mark, self.at + 1)
        if end < 0:
            raise ShellFault(_quote_not_closed(self.line, mark))
        inside = self.text[self.at + 1 : end]
        self.line += inside.count("\n")
        self.at = end + 1
        return inside

    def _ansi_quoted(self) -> str:
        """Read a text in the quotes $'...', whose escapes are those of C (Bash manual, section 3.1.2.4)."""
        match = _ANSI_QUOTED.match(self.text, self.at)
        if match is None:
            raise ShellFault(_quote_not_closed(self.line, "$'"))
        self.at = match.end()
        self.line += match[1].count("\n")
        return _ANSI_ESCAPE.sub(_ansi_character, match[1])

    def quoted(self) -> list[WordPiece]:
        """Read the pieces of the text in double quotes that begins here. Raises ShellFault."""
        begin = self.line
        self.at += 1
        pieces = self.pieces_until('"')
        if self.at >= len(self.text):
            raise ShellFault(_quote_not_closed(begin, '"'))
        self.at += 1
        return pieces

    def pieces_until(self, end: str) -> list[WordPiece]:
        """Read the pieces of a text with expansions until a sign, or all if it is empty. Raises ShellFault."""
        pieces, text = [WordPiece("text", "", True)], ""
        while self.at < len(self.text) and self.text[self.at] != end:
            char, follower = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == "\\" and follower and follower in f"\n\\$`{end}":
                text += "" if follower == "\n" else follower
                self.line += follower == "\n"
                self.at += 2
            elif char in "$`":
                pieces += [WordPiece("text", text, True), self.expansion(quoted=True)]
                text = ""
            else:
                self.line += char == "\n"
                text += char
                self.at += 1
        return [*pieces, WordPiece("text", text, True)]

    def expansion(self, quoted: bool) -> WordPiece:
        """Read the expansion that begins here, at $ or a backtick. Raises ShellFault."""
        text, at = self.text, self.at
        if text[at] == "`":
            return WordPiece("command", self._until("`"), quoted)
        for opening, closing, kind in _BRACKETS:
            if text.startswith(opening, at):
                return WordPiece(kind, self._bracketed(opening, closing), quoted)
        end = at + 1
        if text[end : end + 1] in tuple("0123456789@*#?$!-"):
            end += 1
        else:
            while end < len(text) and (text[end].isalnum() or text[end] == "_") and text[end].isascii():
                end += 1
        self.at = end
        return WordPiece("variable", text[at + 1 : end], quoted) if end > at + 1 else WordPiece("text", "$", quoted)

    def _bracketed(self, opening: str, closing: str) -> str:
        """Read the text within brackets, which may be nested."""
        begin, depth, line = self.at + len(opening), 1, self.line
        opening_char, closing_char = opening[-1], closing[-1]
        self.at = begin
        if closing == "))":
            depth = 2
        cases: list[int] = []  # how deep the commands `case` are whose patterns end with a bracket of their own
        while self.at < len(self.text):
            char = self.text[self.at]
            if closing == ")" and char in "ce" and (word := _CASE.match(self.text, self.at)):
                if word[0] == "case" and _BEFORE_CASE.search(self.text[max(begin, self.at - 20) : self.at]):
                    cases.append(depth)
                if word[0] == "esac" and cases and not self.text[self.at - 1].isalnum():
                    cases.pop()
            if char == ")" and cases and cases[-1] == depth:
                self.at += 1
                continue
            if closing == ")" and char in "'\"":  # a bracket within quotes is text
                self._pass_quoted(char)
                continue
            if char == "\\":
                self.at += 1
            depth += (char == opening_char) - (char == closing_char)
            self.line += char == "\n"
            self.at += 1
            if depth == 0:
                return self.text[begin : self.at - len(closing)]
        raise ShellFault(not_closed(line, opening))

    def _pass_quoted(self, mark: str) -> None:
        """Pass over the text in quotes that begins here, with the expansions in it."""
        if mark == "'":
            self._until(mark)
        else:
            self.quoted()

    def _read_documents(self) -> None:
        for token_index, cuts_tabs, is_quoted in self._documents:
            token = self.tokens[token_index]
            mark = "".join(piece.text for piece in token.pieces)
            lines = []
            while self.at < len(self.text):
                end = _end(self.text, self.at)
                line = self.text[self.at : end]
                self.at, self.line = min(end + 1, len(self.text)), self.line + 1
                if (line.lstrip("\t") if cuts_tabs else line).rstrip("\r") == mark:
                    break
                lines.append(line)
            self.tokens[token_index] = Token(
                token.line, pieces=token.pieces, document="\n".join(lines), expands=not is_quoted
            )
        self._documents = []


def pieces_of(text: str) -> Iterator[WordPiece]:
    """The pieces of an arithmetic expression, in which brackets and comparisons are no operators of the shell."""
    reader = ShellReader(text)
    while reader.at < len(text):
        if text[reader.at] in "$`":
            yield reader.expansion(quoted=True)
        else:
            yield WordPiece("text", text[reader.at], True)
            reader.at += 1


def document_token(text: str, expands: bool = True) -> Token:
    """The text of a here-document as one quoted word. Raises ShellFault."""
    if not expands:
        return Token(1, pieces=(WordPiece("text", text, True),))
    return Token(1, pieces=tuple(ShellReader(text).pieces_until("")))  # quotes are plain signs, but within expansions


def without_end(line: int, beginning: str, end: str) -> str:
    """The fault of a block that does not end."""
    return say("line {line}: {beginning} without {end}; check it", line=line, beginning=beginning, end=end)


def not_closed(line: int, opening: str) -> str:
    """The fault of a bracket that is not closed."""
    return say("line {line}: {opening} is not closed; check it", line=line, opening=opening)


def _quote_not_closed(line: int, mark: str) -> str:
    return say("line {line}: a quote {mark} is not closed; check it", line=line, mark=mark)


def _end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end
