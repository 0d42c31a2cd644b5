"""Blocks of a launch script, followed without running them: conditions, cases and loops."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwright.config.phrase import say
from shardwright.interchange.reading.shell_conditions import fits_pattern
from shardwright.interchange.reading.shell_counted_loops import counted
from shardwright.interchange.reading.shell_guards import REDIRECTIONS, GuardedText, begins_body
from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names
from shardwright.interchange.reading.shell_skipped import SkippedPart, names_of
from shardwright.interchange.reading.shell_words import ShellFault, Token, without_end

if TYPE_CHECKING:
    from shardwright.interchange.reading.shell_script import Script

_MOST_ROUNDS = 200  # of a loop
LOOPS = ("for", "while", "until", "select")
ENDS_OF_PATTERN = (";;", ";&", ";;&")  # of a case; the next part runs, too, or further patterns are tried


class FollowedBlocks(GuardedText):
    """A text that is being followed, from token to token. Tokens of a part that does not run are passed over."""

    def __init__(self, script: "Script", tokens: list[Token], depth: int, *, is_function: bool = False) -> None:
        super().__init__(script, tokens, depth)
        self.is_function = is_function
        self.line_begin = 0  # where the outermost command that is followed begins, with the others of its lines
        self.noted: SkippedPart | None = None  # records what the passed commands would set
        self.asked = ""  # the kind of the last command, as _kind_asked says
        self.is_known = True  # False if a condition of the last if is unknown
        self.succeeds: bool | None = True  # if the last command of the last if or case does
        self.has_pipes = any(token.operator in ("|", "|&") for token in tokens)

    def _until(self, ends: tuple[str, ...], active: bool, level: int = 0) -> bool | None:
        """Follow commands up to one of the closing words in `ends`. True if the last one succeeds; None if unknown."""
        raise NotImplementedError

    @contextmanager
    def _noting(self) -> Iterator[SkippedPart]:
        outer, self.noted = self.noted, SkippedPart()
        try:
            yield self.noted
        finally:
            if outer is not None:
                outer.add(self.noted)
            self.noted = outer

    def redirections(self) -> dict[str, Token]:
        """Pass over redirections. Returns the words behind them by their operators: 2> is one of its own."""
        redirected: dict[str, Token] = {}
        while (token := self._peek()) is not None and token.operator in REDIRECTIONS:
            self.at += 1
            if (target := self._peek()) is not None and not target.operator:
                redirected[("" if token.descriptor in ("0", "1") else token.descriptor) + token.operator] = target
                self.at += 1
        return redirected

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _compound(self, token: Token, active: bool, level: int) -> bool | None:
        """Follow a condition, a loop or a group."""
        if token.plain == "if":
            return self._if(active, level)
        if token.plain == "case":
            return self._case(active, level)
        if token.plain in LOOPS:
            return self._loop(active, level)
        self.at += 1
        close = "}" if token.plain == "{" else ")"
        if not active:
            self._until((close,), active, level + 1)
            self.at += 1
            return True
        begin, ended_on = self.at, self.script.ended_on
        self._until((close,), active=False, level=level + 1)
        end, self.at = self.at + 1, self.at + 1
        redirected, self.at = self.redirections(), begin
        with self.redirected(token.line, [close], redirected):
            succeeds = self._until((close,), active, level + 1)
        if self.ended and close == ")":  # `exit` ends the subshell alone
            self.ended, self.jump, self.is_aborted, self.script.ended_on = False, "", False, ended_on
        self.at = end if not self.ended else self.at
        return succeeds

    def _if(self, active: bool, level: int) -> bool | None:
        self.is_known, self.succeeds = active, True
        with self._noting() as part:
            is_doubtful = self._branches(active, level, part)
        if is_doubtful:
            self.script.doubt(part)
        elif self.is_known:
            self.script.variables.leave_empty(part.options)
        return self.succeeds if self.is_known else None

    def _branches(self, active: bool, level: int, part: SkippedPart) -> bool:
        """Follow an if with all of its branches. True if it is unknown which branch runs."""
        begin, is_done, is_doubtful = self.tokens[self.at].line, not active, False
        is_known = active
        last: bool | None = True
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
                token.plain == "if"
                and active
                and succeeds is None
                and (self._is_guarded_by_else(start) or self._ends_waiting())
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
            is_run = active and not is_done and succeeds is True
            result = self._until(("elif", "else", "fi"), is_run, level + 1)
            last = result if is_run else last
            is_done = is_done or succeeds is True
        if (token := self._peek()) is not None and token.plain == "else":
            self.at += 1
            result = self._until(("fi",), active and not is_done, level + 1)
            last = result if active and not is_done else last
        if not self.ended and self._peek() is None:
            raise ShellFault(without_end(begin, "if", "fi"))
        self.at += 1
        self.is_known, self.succeeds = is_known, last  # of the innermost if that was followed last
        return is_doubtful

    def _note_unknown(self, line: int, begin: int) -> None:
        """Note that a condition, the words from `begin` on, is unknown, with the variables that it depends on."""
        self._note_open(line, self._unset_names(self.tokens[begin : self.at]))

    def _case(self, active: bool, level: int) -> bool | None:
        self.succeeds = True
        with self._noting() as part:
            is_doubtful = self._patterns(active, level)
        if is_doubtful:
            self.script.doubt(part)
        elif self.is_known:
            self.script.variables.leave_empty(part.options)
        return self.succeeds if self.is_known else None

    def _patterns(self, active: bool, level: int) -> bool:
        """Follow a case with all of its patterns. True if it is unknown which pattern matches."""
        begin = self.tokens[self.at].line
        words: list[str] = []
        self.at += 1
        start = self.at
        while (token := self._peek()) is not None and token.plain != "in":
            words += [self.script.variables.text_of(token)] if not token.operator else []
            self.at += 1
        subject, is_done, is_doubtful = self._of_first_rank(" ".join(words), begin, active), not active, False
        is_unknown = any(map(self.script.variables.is_made, unknown_names(subject)))
        is_known, falls = active, False
        last: bool | None = True
        unset = self._unset_names(self.tokens[start : self.at])
        self.at += 1
        while (token := self._peek()) is not None and token.plain != "esac" and not self.ended:
            if token.operator in ("\n", *ENDS_OF_PATTERN, "("):
                self.at += 1
                continue
            patterns = []
            while (token := self._peek()) is not None and token.operator != ")":
                patterns += [self.script.variables.pattern_of(token)] if not token.operator else []
                self.at += 1
            self.at += 1
            fits = [fits_pattern(subject, pattern, self.script.variables.ignores_case) for pattern in patterns]
            is_match = falls or (not is_done and True in fits)
            is_doubtful = is_doubtful or (is_unknown and not is_done and None in fits)
            is_known = is_known and (is_done or None not in fits)
            result = self._until((";;", "esac"), active and is_match, level + 1)
            last = result if active and is_match else last
            end = token.operator if (token := self._peek()) is not None else ""
            falls, is_done = is_match and end == ";&", is_done or (is_match and end != ";;&")
        if not self.ended and self._peek() is None:
            raise ShellFault(without_end(begin, "case", "esac"))
        self.at += 1
        self.is_known, self.succeeds = is_known, last
        if active and not is_known and not is_done and unset:
            self._note_open(begin, unset)
        return is_doubtful

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

    def _loop(self, active: bool, level: int) -> bool | None:
        """Follow a loop whose condition or items are known; note another, and make unknown what it would set. None,
        since its last command alone says if it succeeds."""
        start, kind, line = self.at, self.tokens[self.at].plain, self.tokens[self.at].line
        header, part, body = self._pass_over("done", level)
        end, redirected = self.at, self.redirections()
        self.at = end
        if not active:
            return True
        with self.script.reading(self._given(redirected)):
            if kind in ("while", "until"):
                name, is_followed = "", self._while(start + 1, body, kind == "until", level)
            else:
                name, is_followed = self._for(header, part, body, level)
        if not is_followed:
            self.script.notes.append(say("line {line}: a {kind} loop is not followed", line=line, kind=kind))
            names = names_of(header[1:2]) if kind in ("while", "until") or not name else [name]
            if kind == "for" and names:
                self._once(names[0], body, level)
            for name in names:
                part.put(name, False)
            self.script.doubt(part)
        self.at = end if not self.ended else self.at
        return None

    def _for(self, header: Sequence[Token], part: SkippedPart, body: int, level: int) -> tuple[str, bool]:
        """Follow a for loop. Returns its variable, and False if its items are unknown."""
        variables = self.script.variables
        name, items, last = counted(header, variables, _MOST_ROUNDS) or (*self._items(header), "")
        is_followed = items is not None and header[0].plain == "for"
        for item in items or () if is_followed else ():
            if UNKNOWN.match(item):  # which may be any number of words
                self.script.note_unknown_item(header[0].line, item)
                self._once(name, body, level)
                self.script.doubt(part)
                continue
            variables.put(name, item)
            if not self._body(body, level):
                break
        else:
            if is_followed and last:
                variables.put(name, last)
        return name, is_followed

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
