"""A launch script, followed without running it: its variables, conditions and commands.

Assignments, arrays, here-documents, if, case, groups, scripts within strings (`bash -c "..."`), and other scripts that
it starts or sources where these are given too. What is not followed (loops, functions, what a command prints) is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePath

from shardwright.config.base import shortened
from shardwright.config.other_systems.shell_values import (
    Value,
    Variables,
    is_true,
    readable,
    unknown_names,
)
from shardwright.config.other_systems.shell_words import ShellFault, ShellReader, Token, WordPiece
from shardwright.config.other_systems.whole_text import whole

_MOST_STEPS, _MOST_DEEP = 20_000, 10
_ENDS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_REDIRECTIONS = (">", ">>", "<", "<<", "<<-", "<<<", ">&", "<&", "&>")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_WITHOUT_EFFECT = (
    "echo",
    "mkdir",
    "set",
    "cd",
    "clear",
    "printf",
    "true",
    "module",
    "ulimit",
    "conda",
    "wait",
    "sleep",
)
# Options of a batch system that say how large the job is, and the variables that it sets from them.
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"), "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}  # fmt: skip
_SHORT = {"-N": "nodes", "-n": "ntasks"}


@dataclass(frozen=True)
class Command:
    """A command that the script would run, with its words expanded."""

    line: int
    words: list[str]


@dataclass
class Script:
    """What following a script found. `files` are other scripts by their names, without folders."""

    variables: Variables
    files: Mapping[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # files that here-documents make
    batch: dict[str, str] = field(default_factory=dict)  # options of the batch system
    notes: list[str] = field(default_factory=list)
    steps: int = 0

    def follow(self, text: str, deep: int = 0) -> None:
        """All of a script. Raises ShellFault."""
        if deep > _MOST_DEEP:
            raise ShellFault(f"scripts within scripts, more than {_MOST_DEEP} levels deep; name the innermost one")
        self._directives(text)
        _Run(self, ShellReader(text).read(), deep).all()

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


class _Run:
    """One text on its way: the place of the next token, and whether what is read there is followed."""

    def __init__(self, script: Script, tokens: list[Token], deep: int) -> None:
        self.script, self.tokens, self.deep, self.at, self.ended = script, tokens, deep, 0, False

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
            found = self._one(active and not skips, nested)
            says, connector = (says if skips else found), ""
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
        begin, is_done = self.tokens[self.at].line, not active
        while (token := self._peek()) is not None and token.plain in ("if", "elif"):
            self.at += 1
            says = self._until(("then",), active and not is_done, nested + 1)
            if says is None and not is_done:
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
        return True

    def _case(self, active: bool, nested: int) -> bool | None:
        begin = self.tokens[self.at].line
        words: list[str] = []
        self.at += 1
        while (token := self._peek()) is not None and token.plain != "in":
            words += self.script.variables.words_of(token) if not token.operator else []
            self.at += 1
        subject, is_done = " ".join(words), not active
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
        return True

    def _is_function(self) -> bool:
        """Whether NAME() { begins here."""
        after = self.tokens[self.at + 1 : self.at + 10]
        rest = [token for token in after[2:] if token.operator != "\n"]
        is_called = [token.operator for token in after[:2]] == ["(", ")"] and not _assigned(self.tokens[self.at])
        return is_called and bool(rest) and (rest[0].plain == "{" or rest[0].operator == "(")

    def _skipped(self, active: bool, nested: int) -> bool | None:
        """A loop or a function, which is passed over."""
        token = self.tokens[self.at]
        end = _ENDS.get(token.plain, "}")
        if active:
            what = f"a {token.plain} loop" if token.plain in _ENDS else "a function"
            self.script.notes.append(f"line {token.line}: {what} is not followed")
        while (one := self._peek()) is not None and one.plain not in ("do", "{"):
            self.at += 1
        self.at += 1
        self._until((end,), active=False, nested=nested + 1)
        if self._peek() is None:
            raise ShellFault(f"line {token.line}: {token.plain or 'a function'} without {end}; check it")
        self.at += 1
        return True

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
            if token.operator == "(" and tokens and _assigned(tokens[-1]):
                tokens[-1] = self._array(tokens[-1], active)
                continue
            if token.operator:
                break
            tokens.append(token)
            self.at += 1
        if not tokens and not redirected:
            self.at += 1  # an operator out of place
        return self._act(line, tokens, redirected) if active else True

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
        if active:
            named, appends = _assigned(name) or ("", False)
            self.script.variables.put(named, values, appends)
        return Token(name.line)

    def _act(self, line: int, tokens: list[Token], redirected: dict[str, Token]) -> bool | None:
        variables, script = self.script.variables, self.script
        rest = [token for token in tokens if token.pieces]
        if rest and rest[0].plain in _DECLARING:
            rest = [token for token in rest[1:] if _assigned(token)]
            while rest:
                rest = self._assign(rest)
            return True
        while rest and _assigned(rest[0]):
            rest = self._assign(rest)
        if not rest and not redirected:
            return True
        words = [word for token in rest for word in variables.words_of(token)]
        document = next((redirected[name].document for name in ("<<", "<<-") if name in redirected), None)
        if document is not None:
            token = redirected.get("<<") or redirected["<<-"]
            text = variables.document_of(document) if token.expands else document
            return self._document(words, text, redirected)
        return self._command(line, words, script) if words else True

    def _assign(self, tokens: list[Token]) -> list[Token]:
        name, appends = _assigned(tokens[0]) or ("", False)
        first = tokens[0].pieces[0]
        pieces = (WordPiece("text", first.text[first.text.index("=") + 1 :], False), *tokens[0].pieces[1:])
        value: Value = self.script.variables.text_of(Token(tokens[0].line, pieces=pieces))
        self.script.variables.put(name, value, appends)
        return tokens[1:]

    def _document(self, words: list[str], text: str, redirected: dict[str, Token]) -> bool:
        target = redirected.get(">") or redirected.get(">>")
        if target is not None:
            self.script.written[self.script.variables.text_of(target)] = text
        elif words and PurePath(words[0]).name in ("sbatch", "bash", "sh", "srun"):
            self.script.batch_options([part for word in words for part in word.split("=", 1)])
            self.script.follow(text, self.deep + 1)
        return True

    def _command(self, line: int, words: list[str], script: Script) -> bool | None:
        name = PurePath(words[0]).name or words[0]
        if name in ("[", "[[", "test"):
            return is_true([word for word in words[1:] if word not in ("]", "]]")], script.variables)
        if name in ("exit", "return"):
            self.ended = True
            return True
        if name in ("false", "true"):
            return name == "true"
        if name in _WITHOUT_EFFECT:
            return True
        if name == "unset":
            for word in words[1:]:
                script.variables.values.pop(word, None)
            return True
        if name in ("sbatch", "srun", "salloc"):
            script.batch_options([part for word in words for part in word.split("=", 1)])
        sourced = name in ("source", ".")
        other = next((word for word in words[1:] if PurePath(word).name in script.files), None)
        if other and (sourced or name in ("sbatch", "bash", "sh", "srun")):
            script.follow(script.files[PurePath(other).name], self.deep + 1)
        elif sourced:
            script.notes.append(
                f"line {line}: {shortened(readable(' '.join(words[:2])))} is not read: name that file too"
            )
        else:
            self._started(line, words, script)
        return True

    def _started(self, line: int, words: list[str], script: Script) -> None:
        """A command, or the script within one of its words."""
        if words[0] == "eval":
            script.follow(" ".join(words[1:]), self.deep + 1)
            return
        for before, word in zip(["", *words], words, strict=False):
            is_script = before == "-c" or (" --" in word and ".py" in word)
            if is_script and any(blank in word for blank in " \n"):
                script.follow(word, self.deep + 1)
                return
        script.commands.append(Command(line, words))


def _assigned(token: Token) -> tuple[str, bool] | None:
    """The name that a word assigns, and whether it adds to what is there."""
    if not token.pieces or token.pieces[0].kind != "text" or token.pieces[0].quoted:
        return None
    name, equals, _ = token.pieces[0].text.partition("=")
    appends = name.endswith("+")
    name = name.removesuffix("+")
    return (name, appends) if equals and name.isascii() and name.isidentifier() else None


def unknown_in(words: list[str]) -> list[str]:
    """What the words of a command depend on that is not known."""
    return [name for word in words for name in unknown_names(word)]
