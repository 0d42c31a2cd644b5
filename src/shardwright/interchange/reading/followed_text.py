"""The commands of a launch script, followed from word to word without running them."""

import re

from shardwright.config.phrase import say
from shardwright.interchange.reading.followed_blocks import ENDS_OF_PATTERN, LOOPS, FollowedBlocks
from shardwright.interchange.reading.shell_guards import REDIRECTIONS
from shardwright.interchange.reading.shell_pipes import Given, Printed
from shardwright.interchange.reading.shell_skipped import DECLARING, READING, assigned
from shardwright.interchange.reading.shell_words import ShellFault, Token, WordPiece, not_closed

_KEYS = re.compile("-[a-zA-Z]*A")  # an option of `declare`: an array whose indices are words


class FollowedText(FollowedBlocks):
    """A text that is being followed: its statements, pipelines and simple commands."""

    def all(self) -> bool | None:
        """Follow all of the text. True if its last command succeeds; None if that is unknown."""
        outer, self.script.level = self.script.level, self.depth
        try:
            return self._all()
        finally:
            self.script.level = outer

    def _all(self) -> bool | None:
        succeeds: bool | None = True
        while self.at < len(self.tokens) and not self.ended:
            succeeds = self._until((), active=True)
            if self.is_aborted and not self.is_function:
                self.ended = self.is_aborted = False
                self._pass_over_line()
                succeeds = None
            self.at += 1  # a closing word without its opening word
        return succeeds

    def _pass_over_line(self) -> None:
        """Pass over the outermost command that is followed, with the others of its lines."""
        self.at = self.line_begin
        while (token := self._peek()) is not None and token.operator != "\n":
            if token.operator in ("&&", "||", ";", "&", "|", "|&"):
                self.at += 1
            else:
                self._statement(active=False, level=1)

    def _until(self, ends: tuple[str, ...], active: bool, level: int = 0) -> bool | None:
        """Follow commands up to one of the closing words in `ends`, or the end of the text.

        Returns True if the last command succeeds; None if that is unknown.
        """
        succeeds: bool | None = True
        if level > 60:
            raise ShellFault(say("blocks more than 60 levels deep; check that it is the launch script"))
        connector, begin = "", self.at
        while (token := self._peek()) is not None and not self.ended:
            if token.operator in ("\n", ";", "&", *ENDS_OF_PATTERN, "|", "|&") or not (token.operator or token.pieces):
                if token.operator in ENDS_OF_PATTERN and ";;" in ends:
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
            if level == 0 and not ends and (self.at == 0 or self.tokens[self.at - 1].operator == "\n"):
                self.line_begin = self.at
            if active and connector and succeeds is None and self.asked and not {"then", "do"} & {*ends}:
                if self.asked == "test":
                    self._note_unknown(token.line, begin)
                if self.asked == "test" and not self._is_doubtful(begin):
                    succeeds, is_skipped = False, connector == "&&"
                else:
                    with self._noting() as part:
                        self._pipeline(not is_skipped and self.asked != "test", level)
                    self.script.doubt(part)
                    self._set_status(None)
                    continue
            if active and connector and succeeds is None and {"then", "do"} & {*ends}:
                succeeds, connector = self._with_unknown(connector, level), ""
                continue
            result = self._pipeline(active and not is_skipped, level)
            if active and not is_skipped:
                self._set_status(result)
            succeeds, connector = (succeeds if is_skipped else result), ""
        return succeeds

    def _set_status(self, succeeds: bool | None) -> None:
        """Set $?, which is unknown for a command that may fail in several ways."""
        values = self.script.variables.values
        if succeeds or (succeeds is False and self.asked == "test"):
            values["?"] = "0" if succeeds else "1"
        else:
            values.pop("?", None)

    def _with_unknown(self, connector: str, level: int) -> bool | None:
        """Follow a command of a condition behind one of which it is unknown if it succeeds. True if both, or one of
        them, do."""
        with self._noting() as part:
            succeeds = self._pipeline(active=True, level=level)
        self.script.doubt(part)
        return None if succeeds is (connector == "&&") else succeeds

    def _pipeline(self, active: bool, level: int) -> bool | None:
        """Follow commands with pipes between them, each of which reads what the one before prints."""
        if not active or not self.has_pipes:
            return self._statement(active, level)
        num_inverted = 0
        while self.tokens[self.at].plain == "!" and self.at + 1 < len(self.tokens):
            self.at += 1
            num_inverted += 1
        if num_inverted:
            succeeds = self._piped(level)
            return None if succeeds is None else succeeds is (num_inverted % 2 == 0)
        return self._piped(level)

    def _piped(self, level: int) -> bool | None:
        """Follow commands with pipes between them, without a sign that inverts their status."""
        parts = self._parts(level)
        if len(parts) == 1:
            self.at = parts[0][0]
            return self._statement(active=True, level=level)
        succeeds, given, ended_on = None, self.script.given, self.script.ended_on
        for begin, end in parts:
            self.at = begin
            is_last = end == parts[-1][1]
            printed = self.script.printed if is_last else Printed()
            with self.script.reading(given), self.script.printing(printed):
                succeeds = self._statement(active=True, level=level)
            self.at, self.ended, self.jump, self.script.ended_on = end, False, "", ended_on
            self.is_aborted = False
            if printed is not None and not is_last:
                self.script.count_text(printed)
            has_errors = self.tokens[end].operator == "|&" if end < len(self.tokens) else False
            given = Given(None if has_errors or printed is None else printed.text)
        return succeeds

    def _parts(self, level: int) -> list[tuple[int, int]]:
        """The first and last tokens of the commands of a pipeline."""
        parts: list[tuple[int, int]] = []
        while True:
            begin = self.at
            self._statement(active=False, level=level)
            parts.append((begin, self.at))
            token = self._peek()
            if token is None or token.operator not in ("|", "|&") or self.at == begin:
                return parts
            self.at += 1
            while (token := self._peek()) is not None and token.operator == "\n":
                self.at += 1
            if token is None:
                return parts

    def _statement(self, active: bool, level: int) -> bool | None:
        token = self.tokens[self.at]
        self.script.count_steps(1)
        if token.plain == "function" or self._is_function():
            return self._function(active, level)
        if token.plain == "!":
            self.at += 1
            succeeds = self._statement(active, level) if self._peek() else None
            return None if succeeds is None else not succeeds
        if token.plain not in ("if", "case", "{", *LOOPS) and token.operator != "(":
            return self._simple(active)
        self.script.count_copies()
        state, begin = self.script.variables.state(), self.at
        succeeds = self._compound(token, active, level)
        if token.plain != "{" and token.operator != "(":
            self.asked = ""
        redirected = self.redirections()
        is_group = token.plain == "{" or token.operator == "("
        if self.script.printed is not None and not is_group and {">", ">>", "&>", ">&"} & redirected.keys():
            self.script.printed.write(None)
        if token.operator == "(" or self._is_apart(begin):
            self.script.variables.return_to(state)  # nothing that a subshell sets is seen outside
        return succeeds

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
                redirected |= self.redirections()
                continue
            if token.operator == "(" and tokens and assigned(tokens[-1]):
                if active and tokens[0].plain in DECLARING and any(_KEYS.match(one.plain) for one in tokens[1:-1]):
                    self.script.variables.associative.add((assigned(tokens[-1]) or ("",))[0])
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
        given = self.script.given
        is_unread = (given is None or given.rest is None) and any(token.plain in READING for token in tokens[:1])
        if not self._is_apart(begin) or is_unread:
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
