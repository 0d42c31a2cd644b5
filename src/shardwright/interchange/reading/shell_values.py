"""The values of a script's variables, and the expansion of its words with them; nothing is run.

A variable that nobody has set stays in the text as a mark with its name (UNKNOWN), so that the user has to give it only
if a setting with an effect depends on it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwright.config.fault_gathering_reader import signed
from shardwright.config.phrase import say
from shardwright.interchange.reading.shell_arithmetic import (
    Arithmetic,
    UnknownOperand,
    UnreadExpressionError,
    changed_names,
)
from shardwright.interchange.reading.shell_arrays import Value, appended, as_list, check_length, element
from shardwright.interchange.reading.shell_braces import braced
from shardwright.interchange.reading.shell_expansions import changed_items, changed_text, split_index
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark, readable, unknown_names
from shardwright.interchange.reading.shell_outputs import COUNTS_NODES
from shardwright.interchange.reading.shell_reading import parts_of
from shardwright.interchange.reading.shell_skipped import CASE_OPTION
from shardwright.interchange.reading.shell_words import (
    ShellFault,
    ShellReader,
    Token,
    WordPiece,
    document_token,
    pieces_of,
)

_ELEMENT = re.compile(r"\[([^\]]+)\]=(.*)", re.DOTALL)  # of an associative array
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_WORD = re.compile(r"[A-Za-z_]\w*")
_SIGN = re.compile(r"[*?\[]")  # of a pattern
_MOST_LEVELS = 12


@dataclass
class Variables:
    """The variables of a script. `fixed` names were given from outside and keep their values. `defaulted` maps unset
    variables in ${NAME:-default} to the defaults that were taken."""

    values: dict[str, Value] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    defaulted: dict[str, str] = field(default_factory=dict)
    expansions: set[str] = field(default_factory=set)  # names of marks for anything but variables, such as output
    integers: set[str] = field(default_factory=set)  # names that `declare -i` has made numbers
    kept: frozenset[str] = frozenset()  # names whose values `readonly` has made final
    changed: set[str] = field(default_factory=set)  # names whose values change as they are assigned, by `declare -u`
    associative: set[str] = field(default_factory=set)  # names of arrays whose indices are words, by `declare -A`
    num_shifted: int = 0  # arguments that nobody gave, and that `shift` has passed
    is_open: bool = False  # if a file of settings that is not there may set further variables
    substituted: bool | None = True  # if the last command whose output is a part of a word has succeeded
    output_of: Callable[[str], str | None] = lambda text: None  # the output of commands; None if it is unknown

    def leave_empty(self, names: Collection[str]) -> None:
        """Have variables empty that a branch would have set to options and that nobody else has: it does not run."""
        for name in names:
            if name not in self.fixed:
                self.values.setdefault(name, "")

    def is_made(self, name: str) -> bool:
        """True if the script itself makes an unknown value; False if it comes from the environment."""
        return name in self.values or name in self.expansions or name == "?"

    @property
    def has_arguments(self) -> bool:
        """True if the arguments of the script or function are known; "$@" and "$1" are unknown else."""
        return isinstance(self.values.get("@"), list)

    def set_arguments(self, words: Sequence[str]) -> None:
        """Set the arguments: $@, $# and $1 to $N."""
        for name in [name for name in self.values if name in ("@", "#") or name.isdecimal()]:
            del self.values[name]
        self.values |= {str(place): word for place, word in enumerate(words, 1)}
        self.values |= {"@": list(words), "#": str(len(words))}

    @contextmanager
    def arguments(self, words: Sequence[str]) -> Iterator[None]:
        """Have the arguments of a script or a function while it is followed."""
        outer = {name: value for name, value in self.values.items() if name in ("@", "#") or name.isdecimal()}
        self.set_arguments(words)
        try:
            yield
        finally:
            self.set_arguments(())
            del self.values["@"], self.values["#"]
            self.values |= outer

    def shift(self, number: int) -> None:
        """Pass over arguments."""
        words = self.values.get("@")
        if isinstance(words, list):
            self.set_arguments(words[number:])
        else:
            self.num_shifted += number

    @property
    def separators(self) -> str | None:
        """The characters of $IFS, which split words; None if it is not set, or unknown."""
        value = self.values.get("IFS")
        return value if isinstance(value, str) and not unknown_names(value) else None

    @property
    def ignores_case(self) -> bool | None:
        """True if letters of another case fit a pattern, by `shopt -s nocasematch`; None if that is unknown."""
        value = self.values.get(CASE_OPTION, "")
        return None if not isinstance(value, str) or unknown_names(value) else value == "1"

    def texts(self) -> dict[str, str]:
        """The variables that are no arrays."""
        return {name: value for name, value in self.values.items() if isinstance(value, str) and name != CASE_OPTION}

    def state(self) -> tuple[dict[str, Value], frozenset[str]]:
        """All values, and the names of those that are final: what a shell of its own does not change outside."""
        return dict(self.values), self.kept

    def return_to(self, state: tuple[dict[str, Value], frozenset[str]]) -> None:
        """Have the values that a `state` has."""
        self.values, self.kept = state

    def restore(self, name: str, values: Mapping[str, Value]) -> None:
        """Give a variable the value that it has in `values`, or none."""
        self.changed.discard(name)
        if name in values:
            self.values[name] = values[name]
        else:
            self.values.pop(name, None)

    def put(self, name: str, value: Value, appends: bool = False) -> None:
        """Set a variable, or append to it."""
        if name in self.fixed or name in self.kept:
            return
        value = mark(name) if name in self.changed else value
        old = self.values.get(name)
        if appends and old is not None:
            value = appended(old, value)
        check_length(len(value) if isinstance(value, str) else sum(map(len, value)))
        self.values[name] = value

    def put_items(self, name: str, items: list[str], appends: bool) -> None:
        """Set an array, or append to it; an associative one if each item is [KEY]=VALUE."""
        elements = [_ELEMENT.fullmatch(item) for item in items]
        is_associative = bool(elements) and None not in elements
        pairs = {element[1]: element[2] for element in elements if element}
        self.put(name, pairs if is_associative else items, appends)

    def put_element(self, name: str, index: str, value: str, appends: bool = False) -> None:
        """Set one element of an array, or append to it."""
        old = self.values.get(name)
        if name in self.fixed or name in self.kept:
            return
        index = self.place_in(name, index)
        if unknown_names(index):
            self.doubt(name, appends=False)
            return
        before = element(old, index) if appends and old is not None else None
        value = before + value if isinstance(before, str) else value
        old = [old] if isinstance(old, str) and not unknown_names(old) and name not in self.associative else old
        position = signed(index)
        if isinstance(old, list) and position is not None and -len(old) <= position < len(old):
            self.values[name] = [*old[: position % len(old)], value, *old[position % len(old) + 1 :]]
        elif isinstance(old, list) and position == len(old):
            self.values[name] = [*old, value]
        elif isinstance(old, str) or (isinstance(old, list) and old) or (position or 0) < 0:
            self.doubt(name, appends=False)  # an array with a gap, or with an unknown beginning
        else:
            self.put(name, (old if isinstance(old, dict) else {}) | {index: value})

    def place_in(self, name: str, index: str, depth: int = 0) -> str:
        """The place of an element of an array, by its expanded index: a key, or the value of an expression."""
        value = self.values.get(name)
        if name in self.associative or (isinstance(value, dict) and index in value) or signed(index) is not None:
            return index
        is_expression = all(part in self.values for part in _WORD.findall(index)) or unknown_names(index)
        return self.arithmetic(index, depth) if is_expression else index

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
        return [word for one in braced(token) for word in self._split_words(one, depth)]

    def _split_words(self, token: Token, depth: int) -> list[str]:
        """The expanded words of a token without lists in braces."""
        words: list[str] = []
        current: str | None = None
        can_vanish = False
        separators = self.separators
        blanks = " \t\n" if separators is None else separators
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
                parts = parts_of(text, separators)
                if text[:1] in blanks and current is not None:
                    words.append(current)
                    current = None
                for part_index, part in enumerate(parts):
                    if part_index:
                        words.append(current or "")
                        current = None
                    current = (current or "") + part
                if parts and text[-1:] in blanks:
                    words.append(current or "")
                    current = None
            check_length(sum(map(len, words)) + len(current or ""))
        if current is not None and not (can_vanish and not current):
            words.append(current)
        return words

    def text_of(self, token: Token, depth: int = 0) -> str:
        """The expanded token as one text, as in an assignment."""
        joined = "".join(" ".join(text for text, _ in self._values(piece, depth)) for piece in token.pieces)
        check_length(len(joined))
        return joined

    def pattern_of(self, token: Token) -> str:
        """The expanded token as a pattern of file names, in which quoted signs stand for themselves."""
        texts = [(self.text_of(Token(token.line, pieces=(piece,))), piece.quoted) for piece in token.pieces]
        return "".join(_SIGN.sub(r"[\g<0>]", text) if is_quoted else text for text, is_quoted in texts)

    def document_of(self, text: str) -> str:
        """The expanded text of a here-document."""
        return self.text_of(document_token(text))

    def _values(self, piece: WordPiece, depth: int) -> list[tuple[str, bool]]:
        """The texts of a piece, each with True if it is split at blanks; an array may have several texts."""
        if piece.kind == "text":
            return [(piece.text, False)]
        if depth > _MOST_LEVELS:
            raise ShellFault(
                say("expansions more than {most} levels deep; set the variable plainly", most=_MOST_LEVELS)
            )
        if piece.kind == "arithmetic":
            return [(self.arithmetic(piece.text, depth), False)]
        if piece.kind == "process":
            return [(self.unfollowed(f"<({' '.join(piece.text.split())})"), False)]
        if piece.kind == "command":
            return [(self._command(piece.text, depth), not piece.quoted)]
        return [(text, not piece.quoted) for text in self._variable(piece.text, piece.quoted, depth)]

    def _command(self, text: str, depth: int) -> str:
        """The output of a command, which is known for pwd and for what computes from its words alone."""
        if text.strip() == "pwd":
            return "."
        if COUNTS_NODES.search(text) and isinstance(nodes := self.values.get("SLURM_NNODES"), str):
            return nodes
        self.substituted = None
        output = self.output_of(text)
        return self.unfollowed(f"({' '.join(text.split())})") if output is None else output

    def _variable(self, text: str, quoted: bool, depth: int) -> list[str]:
        if text[:1] in ("#", "!") and len(text) > 1:
            return self._counted(text, depth) if text[0] == "#" else self._indirect(text, quoted, depth)
        name_match = _NAME.match(text)
        if not name_match:
            return [self.unfollowed(f"{{{text}}}")]
        name, modifier = name_match[0], text[name_match.end() :]
        value = self._value_of(name)
        name = str(int(name) + self.num_shifted) if self._is_passed(name) else name
        if name in ("@", "*") and value is None and not modifier:  # the script has no arguments
            return [""] if name == "*" and quoted else []
        if name == "*" and quoted and isinstance(value, list):
            value = self._joined(value)
        is_chosen, unset = modifier.startswith("["), mark(name)
        if is_chosen:
            # An array is given from outside as one text.
            value = value.split() if isinstance(value, str) and name in self.fixed else value
            index, modifier = split_index(modifier)
            is_whole = isinstance(value, dict) or (isinstance(value, list) and not any(map(UNKNOWN.fullmatch, value)))
            unset = "" if is_whole else unset  # an array has no such element
            value = self._chosen(name, value, index, depth)
            value = self._joined(value) if index == "*" and quoted and isinstance(value, list) else value
        is_empty = value is None or (modifier.startswith(":") and value in ("", []))
        sign, word = (modifier[:2], modifier[2:]) if modifier.startswith(":") else (modifier[:1], modifier[1:])
        kind = sign.removeprefix(":")
        if isinstance(value, list) and name not in ("@", "*") and not is_chosen:  # a name alone is the first element
            value = value[0] if value else None if modifier else ""
        if not modifier:
            return as_list(value if value is not None else unset)
        if kind in ("-", "="):
            if not is_empty or (self.is_open and value is None and name.isidentifier()):
                return as_list(mark(name) if value is None else value)
            default = self.with_own_mark(name, self._expanded(word, depth, keeps_quotes=quoted))
            if name not in ("@", "*"):
                self.defaulted.setdefault(name, readable(default))
            if kind == "=" and name.isidentifier():
                self.put(name, default)
            return [default]
        if kind == "+":
            return [""] if is_empty else [self._expanded(word, depth, keeps_quotes=quoted)]
        if kind == "?":
            return as_list(mark(name) if is_empty else value)
        value = unset if value is None else value
        if value == mark(name):
            return [value]
        if is_chosen and value == [mark(name)]:  # an array that is unknown
            return [self.unfollowed(f"{{{text}}}")]
        if isinstance(value, list) and modifier.startswith(":"):  # ${NAME[@]:FROM:LENGTH} are elements
            items = value if name not in ("@", "*") else [mark("0"), *value]
            sliced = changed_items(items, modifier, lambda inner: self._expanded(inner, depth))
            return [self.unfollowed(f"{{{text}}}")] if sliced is None else sliced
        if modifier.startswith("/") and self.ignores_case is not False:
            return [self.unfollowed(f"{{{text}}}")]
        known = [changed_text(item, modifier, lambda inner: self._expanded(inner, depth)) for item in as_list(value)]
        return known if None not in known else [self.unfollowed(f"{{{text}}}")]  # type: ignore[return-value]

    def _chosen(self, name: str, value: Value | None, index: str, depth: int) -> Value | None:
        """The element of an array at an index, or all of them."""
        if index in ("@", "*") or value is None:
            return element(value, index)
        place = self.place_in(name, self._expanded(index, depth) if "$" in index else index.strip("'\""), depth + 1)
        return mark(unknown_names(place)[0]) if unknown_names(place) else element(value, place)

    def _joined(self, values: list[str]) -> str:
        """The text of "${NAME[*]}": its elements with the first separator between them."""
        return (" " if self.separators is None else self.separators[:1]).join(values)

    def _value_of(self, name: str) -> Value | None:
        """The value of a variable or an argument; None if it is unknown."""
        name = "@" if name == "*" else name
        if name.isdecimal() and name != "0" and name not in self.values and self.has_arguments:
            return ""
        return self.values.get(str(int(name) + self.num_shifted) if self._is_passed(name) else name)

    def _is_passed(self, name: str) -> bool:
        """True if the name of an unknown argument counts from those that `shift` has left."""
        return name.isdecimal() and int(name[:9]) > 0 and self.num_shifted > 0 and not self.has_arguments

    def _counted(self, text: str, depth: int) -> list[str]:
        """The length of ${#NAME}, or the number of elements of ${#NAME[@]}."""
        name, _, index = text[1:].partition("[")
        value = self.values.get(name)
        if value is not None and index not in ("@]", "*]"):
            value = (self._variable(text[1:], True, depth) or [""])[0]
        if value is None or (isinstance(value, str) and unknown_names(value)):
            return [self.unfollowed(f"{{{text}}}")]
        return [str(1 if isinstance(value, str) and index in ("@]", "*]") else len(value))]

    def _indirect(self, text: str, quoted: bool, depth: int) -> list[str]:
        """The value of the variable that ${!NAME} names, or the indices of ${!NAME[@]}."""
        name, _, index = text[1:].partition("[")
        value = self.values.get(name)
        if index in ("@]", "*]") and isinstance(value, (dict, list)):
            return list(value) if isinstance(value, dict) else [str(place) for place in range(len(value))]
        if index or not isinstance(value, str) or not _NAME.fullmatch(value):
            return [self.unfollowed(f"{{{text}}}")]
        return self._variable(value, quoted, depth + 1)

    def _expanded(self, text: str, depth: int, keeps_quotes: bool = False) -> str:
        return self.text_of(ShellReader(text).word(keeps_quotes), depth + 1)

    def arithmetic(self, text: str, depth: int = 0) -> str:
        """The value of $(( )): a whole number as text; a mark if a name in it is unknown."""
        if names := changed_names(text):
            for name in names:
                self.doubt(name, appends=False)
            return self.unfollowed(f"(({text.strip()}))")
        values = (self._values(piece, depth + 1) for piece in pieces_of(text))
        plain = "".join(" ".join(text for text, _ in texts) for texts in values)
        if names := unknown_names(plain):
            return mark(names[0])
        try:
            return str(Arithmetic(plain, self.values).value())
        except UnknownOperand as error:
            names = unknown_names(str(self.values.get(error.name, "")))
            return mark(names[0] if names else error.name)
        except UnreadExpressionError:  # asked for if a setting depends on it
            return self.unfollowed(f"(({text.strip()}))")
