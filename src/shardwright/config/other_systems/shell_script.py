"""A launch script, followed without running it: its variables, conditions and commands.

Assignments, arrays, here-documents, if, case, groups, scripts within strings (`bash -c "..."`), and other scripts that
it starts or sources where these are given too. What is not followed (loops, functions, what a command prints) is said.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

from shardwright.config.other_systems.shell_commands import Command, CommandEffects
from shardwright.config.other_systems.shell_skipped import SkippedPart, assigned, names_of
from shardwright.config.other_systems.shell_values import Variables, unknown_names
from shardwright.config.other_systems.shell_words import ShellFault, ShellReader, Token, WordPiece
from shardwright.config.other_systems.whole_text import whole

_MOST_STEPS, _MOST_DEEP = 20_000, 10
_ENDS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_REDIRECTIONS = (">", ">>", "<", "<<", "<<-", "<<<", ">&", "<&", "&>")
# Options of a batch system that say how large the job is, and the variables that it sets from them.
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"), "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}  # fmt: skip
_SHORT = {"-N": "nodes", "-n": "ntasks"}


@dataclass
class Script:
    """The result of following a script. `files` are other scripts by their names, without folders."""

    variables: Variables
    files: Mapping[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # files that here-documents make
    batch: dict[str, str] = field(default_factory=dict)  # options of the batch system
    notes: list[str] = field(default_factory=list)
    functions: dict[str, SkippedPart] = field(default_factory=dict)
    steps: int = 0

    def follow(self, text: str, deep: int = 0, has_words: bool = False) -> None:
        """All of a script, which starts with words of its own or without. Raises ShellFault."""
        if deep > _MOST_DEEP:
            raise ShellFault(f"scripts within scripts, more than {_MOST_DEEP} levels deep; name the innermost one")
        self._directives(text)
        if not has_words:
            self.variables.values.setdefault("#", "0")
        else:
            self.variables.values.pop("#", None)
        _Followed(self, ShellReader(text).read(), deep).all()

    def doubt(self, part: SkippedPart) -> None:
        """From here on nothing is known of what a part would have set, nor the functions that it would have called."""
        called, seen = [part], set[str]()
        while called:
            one = called.pop()
            for name, appends in one.sets.items():
                self.variables.doubt(name, appends)
            called += [self.functions[name] for name in one.calls - seen if name in self.functions]
            seen |= one.calls

    def _directives(self, text: str) -> None:
        for line in text.splitlines():
            if line.startswith("#SBATCH"):
                words = line.split("#", 2)[1].split()[1:]
                self.batch_options([word for one in words for word in one.split("=", 1)])

    def batch_options(self, words: list[str]) -> None:
        """Options of sbatch or srun, of which those that say how large the job is are kept."""
        for word, value in pairwise(words):
            name = _SHORT.get(word, word.removeprefix("--"))
            if name == "gres" and value.startswith("gpu"):
                name, value = "gpus-per-node", value.rpartition(":")[2]
            if name in _SLURM and whole(value) is not None:
                self.batch.setdefault(name, value)
                for variable in _SLURM[name]:
                    self.variables.values.setdefault(variable, value)


class _Followed(CommandEffects):
    """One text on its way: the place of the next token, and whether what is read there is followed."""

    def __init__(self, script: Script, tokens: list[Token], deep: int) -> None:
        super().__init__(script, deep)
        self.tokens, self.at = tokens, 0
        self.noted: SkippedPart | None = None  # what the commands that are passed would set

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
        """True if words from there on hang on more than what nobody has set, which counts as empty."""
        variables = self.script.variables
        names = [name for token in self.tokens[begin : self.at] for name in unknown_names(variables.text_of(token))]
        return not names or any(map(variables.is_made, names))

    def all(self) -> None:
        while self.at < len(self.tokens) and not self.ended:
            self._until((), active=True)
            self.at += 1  # an end without its beginning

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _until(self, ends: tuple[str, ...], active: bool, nested: int = 0) -> bool | None:
        """Commands up to a word that ends them, or the end. Returns what the last one says."""
        says: bool | None = True
        if nested > 60:
            raise ShellFault("blocks more than 60 levels deep; check that it is the launch script")
        connector = ""
        while (token := self._peek()) is not None and not self.ended:
            if token.operator in ("\n", ";", "&", ";;", "|", "|&") or not (token.operator or token.pieces):
                if token.operator == ";;" and ";;" in ends:
                    return says
                connector = "" if token.operator in ("\n", ";", "&") else connector
                self.at += 1
                continue
            if token.operator in ("&&", "||"):
                connector, self.at = token.operator, self.at + 1
                continue
            if token.plain in ends or (token.operator in ends and token.operator):
                return says
            skips = (connector == "&&" and says is False) or (connector == "||" and says is not False)
            is_followed = self._one(active and not skips, nested)
            says, connector = (says if skips else is_followed), ""
        return says

    def _one(self, active: bool, nested: int) -> bool | None:
        token = self.tokens[self.at]
        self.script.steps += 1
        if self.script.steps > _MOST_STEPS:
            raise ShellFault(f"more than {_MOST_STEPS:,} commands; check that it is the launch script")
        if token.plain == "if":
            return self._if(active, nested)
        if token.plain == "case":
            return self._case(active, nested)
        if token.plain in _ENDS or token.plain == "function" or self._is_function():
            return self._skipped(active, nested)
        if token.plain == "{" or token.operator == "(":
            end = "}" if token.plain == "{" else ")"
            self.at += 1
            says = self._until((end,), active, nested + 1)
            self.at += 1
            return says
        return self._simple(active)

    def _if(self, active: bool, nested: int) -> bool | None:
        with self._noting() as part:
            is_doubtful = self._branches(active, nested, part)
        if is_doubtful:
            self.script.doubt(part)
        return True

    def _branches(self, active: bool, nested: int, part: SkippedPart) -> bool:
        """All of an if. Whether it is not known which branch is the one."""
        begin, is_done, is_doubtful = self.tokens[self.at].line, not active, False
        while (token := self._peek()) is not None and token.plain in ("if", "elif"):
            self.at += 1
            start = self.at
            says = self._until(("then",), active and not is_done, nested + 1)
            if says is None and not is_done:
                if not is_doubtful and self._is_doubtful(start):
                    is_doubtful = True
                    part.sets.clear()
                    part.calls.clear()
                self.script.notes.append(f"line {token.line}: a condition that can't be known here is taken as not so")
            self.at += 1
            self._until(("elif", "else", "fi"), active and not is_done and says is True, nested + 1)
            is_done = is_done or says is True
        if (token := self._peek()) is not None and token.plain == "else":
            self.at += 1
            self._until(("fi",), active and not is_done, nested + 1)
        if not self.ended and self._peek() is None:
            raise ShellFault(f"line {begin}: if without fi; check it")
        self.at += 1
        return is_doubtful

    def _case(self, active: bool, nested: int) -> bool | None:
        with self._noting() as part:
            is_doubtful = self._patterns(active, nested)
        if is_doubtful:
            self.script.doubt(part)
        return True

    def _patterns(self, active: bool, nested: int) -> bool:
        """All of a case. Whether it is not known which pattern is the one."""
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
            fits = not is_done and any(fnmatchcase(subject, pattern[:200]) for pattern in patterns)
            self._until((";;", "esac"), active and fits, nested + 1)
            is_done = is_done or fits
        if not self.ended and self._peek() is None:
            raise ShellFault(f"line {begin}: case without esac; check it")
        self.at += 1
        return is_doubtful

    def _is_function(self) -> bool:
        """True if NAME() { begins here."""
        after = self.tokens[self.at + 1 : self.at + 10]
        rest = [token for token in after[2:] if token.operator != "\n"]
        is_called = [token.operator for token in after[:2]] == ["(", ")"] and not assigned(self.tokens[self.at])
        return is_called and bool(rest) and (rest[0].plain == "{" or rest[0].operator == "(")

    def _skipped(self, active: bool, nested: int) -> bool | None:
        """A loop or a function, which is passed over."""
        token = self.tokens[self.at]
        end, is_loop = _ENDS.get(token.plain, "}"), token.plain in _ENDS
        header: list[Token] = []
        says: bool | None = None
        with self._noting() as part:
            if token.plain in ("while", "until"):
                self.at += 1
                says = self._until(("do",), active, nested + 1)
            while (one := self._peek()) is not None and one.plain not in ("do", "{"):
                header.append(one)
                self.at += 1
            self.at += 1
            self._until((end,), active=False, nested=nested + 1)
        if self._peek() is None:
            raise ShellFault(f"line {token.line}: {token.plain or 'a function'} without {end}; check it")
        self.at += 1
        if not active or (is_loop and self._is_empty(token.plain, header, says)):
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

    def _is_empty(self, kind: str, header: list[Token], says: bool | None) -> bool:
        """True if a loop is known to do nothing."""
        if kind in ("while", "until"):
            return says is (kind == "until")
        words = [one for one in header[2:] if not one.operator]
        if words and words[0].plain != "in":
            return False
        variables = self.script.variables
        listed = [word for one in words[1:] for word in variables.words_of(one)] if words else variables.values.get("@")
        return not listed

    def _simple(self, active: bool) -> bool | None:
        """Assignments, and a command behind them."""
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
        return self.act(line, tokens, redirected) if active else True

    def _array(self, name: Token, active: bool) -> Token:
        """The words within NAME=( ... ), which are put where they belong; nothing is left to do then."""
        self.at += 1
        values: list[str] = []
        while (token := self._peek()) is not None and token.operator != ")":
            if not token.operator and active:
                values += self.script.variables.words_of(token)
            self.at += 1
        if self._peek() is None:
            raise ShellFault(f"line {name.line}: ( is not closed; check it")
        self.at += 1
        named, appends = assigned(name) or ("", False)
        if self.noted is not None:
            self.noted.put(named, appends)
        if active:
            variables = self.script.variables
            variables.put(named, [variables.named(named, value) for value in values], appends)
        return Token(name.line)
