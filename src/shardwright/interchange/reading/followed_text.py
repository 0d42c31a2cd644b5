"""The commands of a launch script, followed from word to word without running them: conditions, loops, functions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwright.config.phrase import say
from shardwright.interchange.reading.shell_conditions import fits_pattern
from shardwright.interchange.reading.shell_counted_loops import counted
from shardwright.interchange.reading.shell_guards import REDIRECTIONS, GuardedText, begins_body
from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names
from shardwright.interchange.reading.shell_skipped import READING, SkippedPart, assigned, names_of
from shardwright.interchange.reading.shell_words import ShellFault, Token, WordPiece, not_closed, without_end

if TYPE_CHECKING:
    from shardwright.interchange.reading.shell_script import Script

_MOST_ROUNDS = 200  # of a loop
_LOOPS = ("for", "while", "until", "select")
_ENDS_OF_PATTERN = (";;", ";&", ";;&")  # of a case; the next part runs, too, or further patterns are tried


class FollowedText(GuardedText):
    """A text that is being followed, from token to token. Tokens of a part that does not run are passed over."""

    def __init__(self, script: "Script", tokens: list[Token], depth: int) -> None:
        super().__init__(script, tokens, depth)
        self.noted: SkippedPart | None = None  # records what the passed commands would set
        self.asked = ""  # the kind of the last command, as _kind_asked says
        self.is_known = True  # False if a condition of the last if is unknown

    @contextmanager
    def _noting(self) -> Iterator[SkippedPart]:
        outer, self.noted = self.noted, SkippedPart()
        try:
            yield self.noted
        finally:
            if outer is not None:
                outer.add(self.noted)
            self.noted = outer

    def all(self) -> None:
        while self.at < len(self.tokens) and not self.ended:
            self._until((), active=True)
            self.at += 1  # a closing word without its opening word

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _until(self, ends: tuple[str, ...], active: bool, level: int = 0) -> bool | None:
        """Follow commands up to one of the closing words in `ends`, or the end of the text.

        Returns True if the last command succeeds; None if that is unknown.
        """
        succeeds: bool | None = True
        if level > 60:
            raise ShellFault(say("blocks more than 60 levels deep; check that it is the launch script"))
        connector, begin = "", self.at
        while (token := self._peek()) is not None and not self.ended:
            if token.operator in ("\n", ";", "&", *_ENDS_OF_PATTERN, "|", "|&") or not (token.operator or token.pieces):
                if token.operator in _ENDS_OF_PATTERN and ";;" in ends:
                    return succeeds
                connector = "" if token.operator in ("\n", ";", "&") else connector
                self.at += 1
                continue
            if token.operator in ("&&", "||"):
                connector, self.at = token.operator, self.at + 1
                continue
            if token.plain in ends or (token.operator in ends and token.operator):
                return succeeds
            is_skipped = (connector == "&&" and succeeds is False) or (connector == "||" and succeeds is not False)
            if active and connector and not is_skipped and self._is_guard(begin, self.at, (";", "\n", "&&", "||")):
                is_skipped = True
            begin = begin if connector else self.at
            if active and connector and succeeds is None and self.asked and not {"then", "do"} & {*ends}:
                if self.asked == "test":
                    self._note_unknown(token.line, begin)
                if self.asked == "test" and not self._is_doubtful(begin):
                    succeeds, is_skipped = False, connector == "&&"
                else:
                    with self._noting() as part:
                        self._statement(not is_skipped and self.asked != "test", level)
                    self.script.doubt(part)
                    continue
            result = self._statement(active and not is_skipped, level)
            succeeds, connector = (succeeds if is_skipped else result), ""
        return succeeds

    def _statement(self, active: bool, level: int) -> bool | None:
        token = self.tokens[self.at]
        self.script.count_steps(1)
        if token.plain == "function" or self._is_function():
            return self._function(active, level)
        if token.plain == "!":
            self.at += 1
            succeeds = self._statement(active, level) if self._peek() else None
            return None if succeeds is None else not succeeds
        if token.plain not in ("if", "case", "{", *_LOOPS) and token.operator != "(":
            return self._simple(active)
        self.script.count_copies()
        state, begin = self.script.variables.state(), self.at
        succeeds = self._compound(token, active, level)
        if token.operator == "(" or self._is_apart(begin):
            self.script.variables.return_to(state)  # nothing that a subshell sets is seen outside
        return succeeds

    def _compound(self, token: Token, active: bool, level: int) -> bool | None:
        """Follow a condition, a loop or a group."""
        if token.plain == "if":
            return self._if(active, level)
        if token.plain == "case":
            return self._case(active, level)
        if token.plain in _LOOPS:
            return self._loop(active, level)
        self.at += 1
        succeeds = self._until(("}" if token.plain == "{" else ")",), active, level + 1)
        self.at += 1
        return succeeds

    def _if(self, active: bool, level: int) -> bool | None:
        self.is_known = active
        with self._noting() as part:
            is_doubtful = self._branches(active, level, part)
        if is_doubtful:
            self.script.doubt(part)
        elif self.is_known:
            self.script.variables.leave_empty(part.options)
        return True

    def _branches(self, active: bool, level: int, part: SkippedPart) -> bool:
        """Follow an if with all of its branches. True if it is unknown which branch runs."""
        begin, is_done, is_doubtful = self.tokens[self.at].line, not active, False
        is_known = active
        while (token := self._peek()) is not None and token.plain in ("if", "elif"):
            self.at += 1
            start = self.at
            succeeds = self._until(("then",), active and not is_done, level + 1)
            ends = ("elif", "else", "fi")
            if succeeds and active and not is_done and self._is_guard(start, self.at, ends):
                succeeds = False
            elif succeeds and active and not is_done and self._passes_what_is_there(start, ends):
                succeeds = None
            elif (succeeds is False and active and not is_done and self._makes_what_lacks(start, ends)) or (
                token.plain == "if" and active and succeeds is None and self._is_guarded_by_else(start)
            ):
                succeeds = True
            if succeeds is None and not is_done:
                is_known = False
                if not is_doubtful and self._is_doubtful(start):
                    is_doubtful = True
                    part.sets.clear()
                    part.calls.clear()
                self._note_unknown(token.line, start)
            self.at += 1
            self._until(("elif", "else", "fi"), active and not is_done and succeeds is True, level + 1)
            is_done = is_done or succeeds is True
        if (token := self._peek()) is not None and token.plain == "else":
            self.at += 1
            self._until(("fi",), active and not is_done, level + 1)
        if not self.ended and self._peek() is None:
            raise ShellFault(without_end(begin, "if", "fi"))
        self.at += 1
        self.is_known = is_known  # of the innermost if that was followed last
        return is_doubtful

    def _note_unknown(self, line: int, begin: int) -> None:
        """Note that a condition, the words from `begin` on, is unknown, with the variables that it depends on."""
        self._note_open(line, self._unset_names(self.tokens[begin : self.at]))

    def _case(self, active: bool, level: int) -> bool | None:
        with self._noting() as part:
            is_doubtful = self._patterns(active, level)
        if is_doubtful:
            self.script.doubt(part)
        elif self.is_known:
            self.script.variables.leave_empty(part.options)
        return True

    def _patterns(self, active: bool, level: int) -> bool:
        """Follow a case with all of its patterns. True if it is unknown which pattern matches."""
        begin = self.tokens[self.at].line
        words: list[str] = []
        self.at += 1
        start = self.at
        while (token := self._peek()) is not None and token.plain != "in":
            words += self.script.variables.words_of(token) if not token.operator else []
            self.at += 1
        subject, is_done, is_doubtful = self._of_first_rank(" ".join(words), begin, active), not active, False
        is_unknown = any(map(self.script.variables.is_made, unknown_names(subject)))
        is_known, falls = active, False
        unset = self._unset_names(self.tokens[start : self.at])
        self.at += 1
        while (token := self._peek()) is not None and token.plain != "esac" and not self.ended:
            if token.operator in ("\n", *_ENDS_OF_PATTERN, "("):
                self.at += 1
                continue
            patterns = []
            while (token := self._peek()) is not None and token.operator != ")":
                patterns += [self.script.variables.pattern_of(token)] if not token.operator else []
                self.at += 1
            self.at += 1
            fits = [fits_pattern(subject, pattern) for pattern in patterns]
            is_match = falls or (not is_done and True in fits)
            is_doubtful = is_doubtful or (is_unknown and not is_done and None in fits)
            is_known = is_known and (is_done or None not in fits)
            self._until((";;", "esac"), active and is_match, level + 1)
            end = token.operator if (token := self._peek()) is not None else ""
            falls, is_done = is_match and end == ";&", is_done or (is_match and end != ";;&")
        if not self.ended and self._peek() is None:
            raise ShellFault(without_end(begin, "case", "esac"))
        self.at += 1
        self.is_known = is_known
        if active and not is_known and not is_done and unset:
            self._note_open(begin, unset)
        return is_doubtful

    def _is_function(self) -> bool:
        """True if a function, NAME() {, begins here."""
        following = self.tokens[self.at + 1 : self.at + 10]
        body = [token for token in following[2:] if token.operator != "\n"]
        is_called = [token.operator for token in following[:2]] == ["(", ")"] and not assigned(self.tokens[self.at])
        return is_called and bool(body) and (body[0].plain == "{" or body[0].operator == "(")

    def _function(self, active: bool, level: int) -> bool:
        """Keep a function, which is followed where it is called."""
        token = self.tokens[self.at]
        header, part, begin = self._pass_over("}", level)
        if active:
            is_subshell = self.tokens[begin - 1].operator == "("  # whose body has the brackets, too
            part.body = self.tokens[begin - is_subshell : self.at - 1 + is_subshell]
            self.script.functions[(header[1] if token.plain == "function" else token).plain] = part
        return True

    def _pass_over(self, end: str, level: int) -> tuple[list[Token], SkippedPart, int]:
        """Pass over a loop or a function: the words before its body, what the body would set, and where it begins."""
        token, header = self.tokens[self.at], list[Token]()
        with self._noting() as part:
            if token.plain in ("while", "until"):
                self.at += 1
                self._until(("do",), active=False, level=level + 1)
            while (header_token := self._peek()) is not None and not begins_body(header_token, header):
                header.append(header_token)
                self.at += 1
            self.at += 1
            begin = self.at
            end = ")" if self.tokens[begin - 1 : begin] and self.tokens[begin - 1].operator == "(" else end
            self._until((end,), active=False, level=level + 1)
        if self._peek() is None:
            raise ShellFault(without_end(token.line, token.plain or say("a function"), end))
        self.at += 1
        return header, part, begin

    def _loop(self, active: bool, level: int) -> bool:
        """Follow a loop whose condition or items are known; note another, and make unknown what it would set."""
        start, kind, line, name = self.at, self.tokens[self.at].plain, self.tokens[self.at].line, ""
        header, part, body = self._pass_over("done", level)
        end = self.at
        if not active:
            return True
        if kind in ("while", "until"):
            is_followed = self._while(start + 1, body, kind == "until", level)
        else:
            name, items, last = counted(header, self.script.variables, _MOST_ROUNDS) or (*self._items(header), "")
            is_followed = items is not None and kind == "for"
            for item in items or () if is_followed else ():
                if UNKNOWN.match(item):  # which may be any number of words
                    self.script.note_unknown_item(line, item)
                    self._once(name, body, level)
                    self.script.doubt(part)
                    continue
                self.script.variables.put(name, item)
                if not self._body(body, level):
                    break
            else:
                if is_followed and last:
                    self.script.variables.put(name, last)
        if not is_followed:
            self.script.notes.append(say("line {line}: a {kind} loop is not followed", line=line, kind=kind))
            names = names_of(header[1:2]) if kind in ("while", "until") or not name else [name]
            if kind == "for" and names:
                self._once(names[0], body, level)
            for name in names:
                part.put(name, False)
            self.script.doubt(part)
        self.at = end if not self.ended else self.at
        return True

    def _while(self, condition: int, body: int, is_until: bool, level: int) -> bool:
        """Follow a while loop. False if it is unknown when it ends."""
        for _ in range(_MOST_ROUNDS):
            self.at = condition
            succeeds = self._until(("do",), active=True, level=level + 1)
            if succeeds is None and self._is_of_arguments(condition, self.at):
                return True  # a loop over arguments that nobody gave
            if succeeds is None or self.ended:
                return self.ended
            if succeeds is is_until or not self._body(body, level):
                return True
            if self.tokens[condition].plain in ("true", ":"):  # it would go on until a run ends well
                return True
        return False

    def _is_of_arguments(self, begin: int, end: int) -> bool:
        """True if a condition is unknown for arguments alone, which the script does not have."""
        names = self._unset_names(self.tokens[begin:end])
        return bool(names) and all(name == "#" or name.isdecimal() for name in names)

    def _once(self, name: str, body: int, level: int) -> None:
        """Follow the body of a loop once for an item that is unknown, for the commands in it."""
        self.script.variables.doubt(name, appends=False)
        self._body(body, level)
        self.ended, self.jump = False, ""

    def _body(self, begin: int, level: int) -> bool:
        """Follow the body of a loop once. False if the loop ends there."""
        self.at = begin
        self._until(("done",), active=True, level=level + 1)
        jump = self.jump
        if jump and self.num_jumped > 1:  # which goes on in the loop around this one
            self.num_jumped -= 1
            return False
        self.jump = ""
        if jump:
            self.ended = False
        return not self.ended and jump != "break"

    def _items(self, header: Sequence[Token]) -> tuple[str, list[str] | None]:
        """The variable of a for loop and the words that it goes through; none if all are unknown, or they are many."""
        tokens = [token for token in header[2:] if not token.operator]
        name, variables = header[1].plain if header[1:] else "", self.script.variables
        if tokens and tokens[0].plain != "in":
            return name, None
        words = [word for token in tokens[1:] for word in variables.words_of(token)]
        if not tokens:
            arguments = variables.values.get("@")
            words = arguments if isinstance(arguments, list) else []
        is_known = len(words) <= _MOST_ROUNDS and not (words and all(map(UNKNOWN.match, words)))
        return name, words if is_known else None

    def _simple(self, active: bool) -> bool | None:
        """Follow a simple command with the assignments and redirections around it."""
        line, tokens, redirected = self.tokens[self.at].line, list[Token](), dict[str, Token]()
        begin, in_test = self.at, self.tokens[self.at].plain == "[["
        while (token := self._peek()) is not None:
            if in_test and token.plain == "]]":
                in_test = False
            elif in_test and token.operator:
                tokens.append(Token(token.line, pieces=(WordPiece("text", token.operator, True),)))
                self.at += 1
                continue
            if token.operator in REDIRECTIONS:
                self.at += 1
                if (target := self._peek()) is not None and not target.operator:
                    redirected[token.operator] = target
                    self.at += 1
                continue
            if token.operator == "(" and tokens and assigned(tokens[-1]):
                tokens[-1] = self._array(tokens[-1], active)
                continue
            if token.operator:
                break
            tokens.append(token)
            self.at += 1
        if not tokens and not redirected:
            self.at += 1  # an operator out of place
        if self.noted is not None:
            self.noted.command(tokens)
        self.asked = self._kind_asked(tokens)
        if not active:
            return True
        if not self._is_apart(begin) or any(token.plain in READING for token in tokens[:1]):
            return self.apply(line, tokens, redirected)
        self.script.count_copies()
        state = self.script.variables.state()
        succeeds = self.apply(line, tokens, redirected)
        self.script.variables.return_to(state)
        return succeeds

    def _array(self, name: Token, active: bool) -> Token:
        """Assign the array NAME=( ... ). Returns an empty token, since nothing is left to do."""
        self.at += 1
        values: list[str] = []
        while (token := self._peek()) is not None and token.operator != ")":
            if not token.operator and active:
                values += self.script.variables.words_of(token)
            self.at += 1
        if self._peek() is None:
            raise ShellFault(not_closed(name.line, "("))
        self.at += 1
        variable_name, appends = assigned(name) or ("", False)
        if self.noted is not None:
            self.noted.put(variable_name, appends)
        if active:
            variables = self.script.variables
            items = [variables.with_own_mark(variable_name, value) for value in values]
            variables.put_items(variable_name, items, appends)
        return Token(name.line)
