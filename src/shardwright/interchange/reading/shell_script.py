"""A launch script, followed without running it: its variables, conditions and commands.

Followed are assignments, arrays, here-documents, if, case, groups, scripts within strings (`bash -c "..."`), and other
scripts that it starts or sources, if they are among the files. Loops, functions and the output of commands are not
followed; notes report the loops and functions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

from shardwright.config.fault_gathering_reader import whole
from shardwright.interchange.reading.shell_commands import Command, CommandEffects
from shardwright.interchange.reading.shell_skipped import SkippedPart, assigned, names_of
from shardwright.interchange.reading.shell_values import Variables, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault, ShellReader, Token, WordPiece

_MOST_STEPS, _MOST_LEVELS = 20_000, 10
_COPIED_IN_A_STEP = 32  # variables that are copied in the time of a command
_ENDS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_REDIRECTIONS = (">", ">>", "<", "<<", "<<-", "<<<", ">&", "<&", "&>")
# Slurm's options for the size of a job -> the variables that Slurm sets from them.
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
_SHORT_OPTIONS = {"-N": "nodes", "-n": "ntasks"}


@dataclass
class Script:
    """The result of following a script. `files` are other scripts by name, without folders."""

    variables: Variables
    files: Mapping[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # texts of files that here-documents write, by name
    batch: dict[str, str] = field(default_factory=dict)  # options of the batch system
    notes: list[str] = field(default_factory=list)
    functions: dict[str, SkippedPart] = field(default_factory=dict)
    steps: int = 0

    def follow(self, text: str, depth: int = 0, has_words: bool = False) -> None:
        """Follow a script. `has_words` is True if it is started with arguments. Raises ShellFault."""
        if depth > _MOST_LEVELS:
            raise ShellFault(f"scripts within scripts, more than {_MOST_LEVELS} levels deep; name the innermost one")
        self._directives(text)
        if not has_words:
            self.variables.values.setdefault("#", "0")
        else:
            self.variables.values.pop("#", None)
        _Followed(self, ShellReader(text).read(), depth).all()

    def count_steps(self, number: int) -> None:
        """Count work. Raises ShellFault above a limit."""
        self.steps += number
        if self.steps > _MOST_STEPS:
            raise ShellFault(f"more than {_MOST_STEPS:,} commands; check that it is the launch script")

    def count_copies(self) -> None:
        """Count a copy of all variables as work. Raises ShellFault above a limit."""
        self.count_steps(len(self.variables.values) // _COPIED_IN_A_STEP)

    def doubt(self, part: SkippedPart) -> None:
        """Make unknown what a skipped part would set, and what the functions that it calls would set."""
        parts, seen = [part], set[str]()
        while parts:
            skipped = parts.pop()
            for name, appends in skipped.sets.items():
                self.variables.doubt(name, appends)
            parts += [self.functions[name] for name in skipped.calls - seen if name in self.functions]
            seen |= skipped.calls

    def _directives(self, text: str) -> None:
        for line in text.splitlines():
            if line.startswith("#SBATCH"):
                words = line.split("#", 2)[1].split()[1:]
                self.batch_options([word for option in words for word in option.split("=", 1)])

    def batch_options(self, words: list[str]) -> None:
        """Keep the options of sbatch or srun that give the size of the job."""
        for word, value in pairwise(words):
            name = _SHORT_OPTIONS.get(word, word.removeprefix("--"))
            if name == "gres" and value.startswith("gpu"):
                name, value = "gpus-per-node", value.rpartition(":")[2]
            if name in _SLURM and whole(value) is not None:
                self.batch.setdefault(name, value)
                for variable in _SLURM[name]:
                    self.variables.values.setdefault(variable, value)


class _Followed(CommandEffects):
    """A text that is being followed, from token to token. Tokens of a part that does not run are passed over."""

    def __init__(self, script: Script, tokens: list[Token], depth: int) -> None:
        super().__init__(script, depth)
        self.tokens, self.at = tokens, 0
        self.noted: SkippedPart | None = None  # records what the passed commands would set

    @contextmanager
    def _noting(self) -> Iterator[SkippedPart]:
        outer, self.noted = self.noted, SkippedPart()
        try:
            yield self.noted
        finally:
            if outer is not None:
                outer.add(self.noted)
            self.noted = outer

    def _is_doubtful(self, begin: int) -> bool:
        """True if the words from `begin` on are unknown, and not only for unset variables, which count as empty."""
        variables = self.script.variables
        names = [name for token in self.tokens[begin : self.at] for name in unknown_names(variables.text_of(token))]
        return not names or any(map(variables.is_made, names))

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
            raise ShellFault("blocks more than 60 levels deep; check that it is the launch script")
        connector = ""
        while (token := self._peek()) is not None and not self.ended:
            if token.operator in ("\n", ";", "&", ";;", "|", "|&") or not (token.operator or token.pieces):
                if token.operator == ";;" and ";;" in ends:
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
            result = self._statement(active and not is_skipped, level)
            succeeds, connector = (succeeds if is_skipped else result), ""
        return succeeds

    def _statement(self, active: bool, level: int) -> bool | None:
        token = self.tokens[self.at]
        self.script.count_steps(1)
        if token.plain == "if":
            return self._if(active, level)
        if token.plain == "case":
            return self._case(active, level)
        if token.plain in _ENDS or token.plain == "function" or self._is_function():
            return self._skipped(active, level)
        if token.plain == "{" or token.operator == "(":
            end = "}" if token.plain == "{" else ")"
            variables, is_subshell = self.script.variables, end == ")"
            if is_subshell:
                self.script.count_copies()
            values = dict(variables.values) if is_subshell else variables.values
            self.at += 1
            succeeds = self._until((end,), active, level + 1)
            self.at += 1
            variables.values = values  # nothing that a subshell sets is seen outside
            return succeeds
        return self._simple(active)

    def _if(self, active: bool, level: int) -> bool | None:
        with self._noting() as part:
            is_doubtful = self._branches(active, level, part)
        if is_doubtful:
            self.script.doubt(part)
        return True

    def _branches(self, active: bool, level: int, part: SkippedPart) -> bool:
        """Follow an if with all of its branches. True if it is unknown which branch runs."""
        begin, is_done, is_doubtful = self.tokens[self.at].line, not active, False
        while (token := self._peek()) is not None and token.plain in ("if", "elif"):
            self.at += 1
            start = self.at
            succeeds = self._until(("then",), active and not is_done, level + 1)
            if succeeds is None and not is_done:
                if not is_doubtful and self._is_doubtful(start):
                    is_doubtful = True
                    part.sets.clear()
                    part.calls.clear()
                self.script.notes.append(f"line {token.line}: a condition that can't be known here is taken as not so")
            self.at += 1
            self._until(("elif", "else", "fi"), active and not is_done and succeeds is True, level + 1)
            is_done = is_done or succeeds is True
        if (token := self._peek()) is not None and token.plain == "else":
            self.at += 1
            self._until(("fi",), active and not is_done, level + 1)
        if not self.ended and self._peek() is None:
            raise ShellFault(f"line {begin}: if without fi; check it")
        self.at += 1
        return is_doubtful

    def _case(self, active: bool, level: int) -> bool | None:
        with self._noting() as part:
            is_doubtful = self._patterns(active, level)
        if is_doubtful:
            self.script.doubt(part)
        return True

    def _patterns(self, active: bool, level: int) -> bool:
        """Follow a case with all of its patterns. True if it is unknown which pattern matches."""
        begin = self.tokens[self.at].line
        words: list[str] = []
        self.at += 1
        while (token := self._peek()) is not None and token.plain != "in":
            words += self.script.variables.words_of(token) if not token.operator else []
            self.at += 1
        subject, is_done = " ".join(words), not active
        names = unknown_names(subject)
        is_doubtful = active and any(map(self.script.variables.is_made, names))
        self.at += 1
        while (token := self._peek()) is not None and token.plain != "esac" and not self.ended:
            if token.operator in ("\n", ";;", "("):
                self.at += 1
                continue
            patterns = []
            while (token := self._peek()) is not None and token.operator != ")":
                patterns += [self.script.variables.text_of(token)] if not token.operator else []
                self.at += 1
            self.at += 1
            is_match = not is_done and any(fnmatchcase(subject, pattern[:200]) for pattern in patterns)
            self._until((";;", "esac"), active and is_match, level + 1)
            is_done = is_done or is_match
        if not self.ended and self._peek() is None:
            raise ShellFault(f"line {begin}: case without esac; check it")
        self.at += 1
        return is_doubtful

    def _is_function(self) -> bool:
        """True if a function, NAME() {, begins here."""
        following = self.tokens[self.at + 1 : self.at + 10]
        body = [token for token in following[2:] if token.operator != "\n"]
        is_called = [token.operator for token in following[:2]] == ["(", ")"] and not assigned(self.tokens[self.at])
        return is_called and bool(body) and (body[0].plain == "{" or body[0].operator == "(")

    def _skipped(self, active: bool, level: int) -> bool | None:
        """Pass over a loop or a function; note it, and make unknown what a loop would set."""
        token = self.tokens[self.at]
        end, is_loop = _ENDS.get(token.plain, "}"), token.plain in _ENDS
        header: list[Token] = []
        condition: bool | None = None
        with self._noting() as part:
            if token.plain in ("while", "until"):
                self.at += 1
                condition = self._until(("do",), active, level + 1)
            while (header_token := self._peek()) is not None and header_token.plain not in ("do", "{"):
                header.append(header_token)
                self.at += 1
            self.at += 1
            self._until((end,), active=False, level=level + 1)
        if self._peek() is None:
            raise ShellFault(f"line {token.line}: {token.plain or 'a function'} without {end}; check it")
        self.at += 1
        if not active or (is_loop and self._is_empty(token.plain, header, condition)):
            return True
        self.script.notes.append(
            f"line {token.line}: {f'a {token.plain} loop' if is_loop else 'a function'} is not followed"
        )
        if is_loop:
            for name in names_of(header[1:2]):
                part.put(name, False)
            self.script.doubt(part)
        else:
            self.script.functions[(header[1] if token.plain == "function" else token).plain] = part
        return True

    def _is_empty(self, kind: str, header: list[Token], condition: bool | None) -> bool:
        """True if it is known that the body of a loop never runs."""
        if kind in ("while", "until"):
            return condition is (kind == "until")
        tokens = [token for token in header[2:] if not token.operator]
        if tokens and tokens[0].plain != "in":
            return False
        variables = self.script.variables
        items = (
            [word for token in tokens[1:] for word in variables.words_of(token)]
            if tokens
            else variables.values.get("@")
        )
        return not items

    def _simple(self, active: bool) -> bool | None:
        """Follow a simple command with the assignments and redirections around it."""
        line, tokens, redirected = self.tokens[self.at].line, list[Token](), dict[str, Token]()
        in_test = self.tokens[self.at].plain == "[["
        while (token := self._peek()) is not None:
            if in_test and token.plain == "]]":
                in_test = False
            elif in_test and token.operator:
                tokens.append(Token(token.line, pieces=(WordPiece("text", token.operator, True),)))
                self.at += 1
                continue
            if token.operator in _REDIRECTIONS:
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
        return self.apply(line, tokens, redirected) if active else True

    def _array(self, name: Token, active: bool) -> Token:
        """Assign the array NAME=( ... ). Returns an empty token, since nothing is left to do."""
        self.at += 1
        values: list[str] = []
        while (token := self._peek()) is not None and token.operator != ")":
            if not token.operator and active:
                values += self.script.variables.words_of(token)
            self.at += 1
        if self._peek() is None:
            raise ShellFault(f"line {name.line}: ( is not closed; check it")
        self.at += 1
        variable_name, appends = assigned(name) or ("", False)
        if self.noted is not None:
            self.noted.put(variable_name, appends)
        if active:
            variables = self.script.variables
            variables.put(variable_name, [variables.with_own_mark(variable_name, value) for value in values], appends)
        return Token(name.line)
