"""Conditions of a script that ask for what it is given or for files: guards that end it, and files that it makes."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardwright.config.phrase import both, say
from shardwright.interchange.reading.shell_arithmetic import changed_names
from shardwright.interchange.reading.shell_commands import CommandEffects
from shardwright.interchange.reading.shell_marks import RANK_NAME, UNKNOWN, unknown_names
from shardwright.interchange.reading.shell_words import Token

if TYPE_CHECKING:
    from shardwright.interchange.reading.shell_script import Script

_MOST_GUARD = 200  # words of what a guard does
_ANSWERING = ("grep", "which", "command", "diff", "cmp", "type", "hash", "pgrep")
_APART = ("|", "|&", "&")
REDIRECTIONS = (">", ">>", "<", "<<", "<<-", "<<<", ">&", "<&", "&>")
_FILE_TESTS = ("-d", "-e", "-f", "-s")


class GuardedText(CommandEffects):
    """The tokens of a text that is being followed, up to the one at `at`, with what its conditions ask for."""

    def __init__(self, script: "Script", tokens: list[Token], depth: int) -> None:
        super().__init__(script, depth)
        self.tokens, self.at = tokens, 0

    def _is_guard(self, begin: int, end: int, ends: tuple[str, ...]) -> bool:
        """True if the part from `end` on ends the script because of what nobody gave: the words from `begin` to `end`,
        a condition, depend on it. Such a guard is passed, with a note, since who starts the script gives it."""
        unset = self._unset_names(self.tokens[begin:end])
        if not unset or not self._ends_script(end, ends):
            return False
        self.script.notes.append(
            say(
                "line {line}: the script ends there without {names}, which is taken as given ({ways})",
                line=self.tokens[begin].line,
                names=both([say("arguments") if name == "#" else name for name in unset]),
                ways=" ".join("-- ARGUMENTS" if name == "#" else f"--set {name}=VALUE" for name in unset),
            )
        )
        return True

    def _is_guarded_by_else(self, begin: int) -> bool:
        """True if the script goes on only in the part behind a condition that can't be known, the words from `begin`
        on, since its `else` ends the script: it is taken as so. One that chooses by what nobody gave is left, for a
        value would be guessed."""
        if self._unset_names(self.tokens[begin : self.at]) or not self._else_ends_script():
            return False
        self.script.notes.append(
            say(
                "line {line}: a condition that can't be known here is taken as so, since the script ends otherwise",
                line=self.tokens[begin].line,
            )
        )
        return True

    def _else_ends_script(self) -> bool:
        """True if the part that begins here has an `else`, and `exit` is a command of that itself."""
        depth, is_else = 0, False
        for token in self.tokens[self.at + 1 :]:
            word = token.plain or token.operator
            if depth == 0 and word in ("fi", "elif"):
                return False
            if is_else and depth == 0 and word == "exit":
                return True
            is_else = is_else or (depth == 0 and word == "else")
            depth += (word in ("if", "case", "{", "(")) - (word in ("fi", "esac", "}", ")"))
        return False

    def _unset_names(self, tokens: Sequence[Token]) -> list[str]:
        """The variables of some words that nobody has set, and "#" if the number of unknown arguments is in them."""
        variables = self.script.variables
        names: list[str] = []
        for token in tokens:
            if any(piece.text == "#" and piece.kind == "variable" for piece in token.pieces):
                names += [] if variables.has_arguments else ["#"]
            names += [name for name in self._names_in(token) if not variables.is_made(name)]
        return [*dict.fromkeys(names)]

    def _names_in(self, token: Token) -> list[str]:
        """The names of what is unknown in a word; none in an expression that changes variables, which is done once."""
        if any(piece.kind == "arithmetic" and changed_names(piece.text) for piece in token.pieces):
            return []
        return unknown_names(self.script.variables.text_of(token))

    def _ends_script(self, begin: int, ends: tuple[str, ...]) -> bool:
        """True if `exit` is among the commands from a place up to one of the words in `ends`."""
        depth, place = 0, begin
        while place < len(self.tokens) and place < begin + _MOST_GUARD:
            token = self.tokens[place]
            word = token.plain or token.operator
            if depth == 0 and word in ends and place > begin:
                return False
            function = self.script.functions.get(token.plain)
            if word == "exit" or (function and any(inner.plain == "exit" for inner in function.body)):
                return True
            depth += (word in ("if", "case", "{", "(")) - (word in ("fi", "esac", "}", ")"))
            place += 1
        return False

    def _passes_what_is_there(self, begin: int, ends: tuple[str, ...]) -> bool:
        """True if a condition asks for a file and the part behind it goes on with the loop: it passes results."""
        words = [token.plain for token in self.tokens[begin : self.at]]
        if not any(word in _FILE_TESTS for word in words) or "!" in words:
            return False
        for token in self.tokens[self.at : self.at + _MOST_GUARD]:
            if token.plain in ("continue", *ends):
                return token.plain == "continue"
        return False

    def _ends_waiting(self) -> bool:
        """True if the part that begins here leaves a loop, and the loop sleeps otherwise: it waits for what the
        condition asks, such as free devices."""
        depth, is_left, is_behind, before = 0, False, False, "then"
        for token in self.tokens[self.at + 1 : self.at + _MOST_GUARD]:
            begins = not before.isalnum() or before in ("then", "else", "do")
            before = token.operator or token.plain or "word"
            word = before if begins or token.operator else ""  # and no argument, such as that of echo done
            if depth == 0 and word == "done":
                return False
            is_behind = is_behind or (depth == 0 and word in ("else", "fi"))
            is_left = is_left or (depth == 0 and word == "break" and not is_behind)
            if is_behind and word == "sleep" and is_left:
                note = say(
                    "line {line}: a condition that can't be known here is taken as so, since the script waits for it",
                    line=self.tokens[self.at].line,
                )
                self.script.notes.append(note)
                return True
            depth += (word in ("if", "case", "{", "(", "do")) - (word in ("fi", "esac", "}", ")", "done") and depth > 0)
        return False

    def _makes_what_lacks(self, begin: int, ends: tuple[str, ...]) -> bool:
        """True if a condition asks for a file that lacks, and the part behind it writes that file, which is none of the
        files here: it is written then."""
        tokens, text_of = self.tokens, self.script.variables.text_of
        words = [token.plain for token in tokens[begin : self.at]]
        tested = [
            text_of(after) for word, after in zip(words, tokens[begin + 1 :], strict=False) if word in _FILE_TESTS
        ]
        if "!" not in words or len(tested) != 1 or PurePath(tested[0]).name in self.script.present:
            return False
        for place, token in enumerate(tokens[self.at : self.at + _MOST_GUARD], self.at):
            if token.plain in ends:
                return False
            if token.operator == ">" and place + 1 < len(tokens) and text_of(tokens[place + 1]) == tested[0]:
                return True
        return False

    def _note_open(self, line: int, names: list[str]) -> None:
        """Note that a condition is unknown, and the variables among some names that nobody has set."""
        unset = [name for name in names if name.isalnum() or name.isidentifier()]
        note = say("line {line}: a condition that can't be known here is taken as not so", line=line)
        if unset:
            ways = " ".join(f"--set {name}=VALUE" for name in unset)
            note = say(
                "line {line}: a condition depends on what nobody gave, and is taken as not so ({ways})",
                line=line,
                ways=ways,
            )
        self.script.notes.append(note)

    def _of_first_rank(self, subject: str, line: int, active: bool) -> str:
        """The subject of a case, of rank 0 if it is a rank that nobody gives: each rank has a part of its own."""
        names = unknown_names(subject)
        is_rank = all(RANK_NAME.search(name) and not self.script.variables.is_made(name) for name in names)
        if not (names and is_rank and active):
            return subject
        self.script.notes.append(
            say("line {line}: of a case the part of rank 0 is followed ({names})", line=line, names=both(names))
        )
        return UNKNOWN.sub("0", subject)

    def _kind_asked(self, tokens: list[Token]) -> str:
        """The kind of a command: "test" for a condition, "answer" for another one that && and || ask; else empty."""
        first = tokens[0] if tokens else None
        if first is None:
            return ""
        if first.plain in ("[", "[[", "test", "false") or [piece.kind for piece in first.pieces] == ["arithmetic"]:
            return "test"
        return "answer" if first.plain in _ANSWERING or first.plain in self.script.functions else ""

    def _is_apart(self, begin: int) -> bool:
        """True if the command from `begin` on runs in a shell of its own: it is part of a pipeline, or not waited for.
        Nothing that it sets is seen outside."""
        before = self.tokens[begin - 1].operator if begin else ""
        at = self.at
        while at + 1 < len(self.tokens) and self.tokens[at].operator in REDIRECTIONS:
            at += 2
        behind = self.tokens[at].operator if at < len(self.tokens) else ""
        return before in ("|", "|&") or behind in _APART

    def _is_doubtful(self, begin: int) -> bool:
        """True if the words from `begin` on are unknown, and not only for unset variables, which count as empty."""
        variables = self.script.variables
        names = [name for token in self.tokens[begin : self.at] for name in self._names_in(token)]
        return not names or any(map(variables.is_made, names))


def begins_body(token: Token, header: Sequence[Token]) -> bool:
    """True if the body of a loop or a function begins at a token, `header` being the tokens before it."""
    before = [other.operator for other in header if other.operator.strip()]
    return token.plain in ("do", "{") or (token.operator == "(" and before[-2:] == ["(", ")"])
