"""A launch script, followed without running it: its variables, conditions and commands.

Followed are assignments, arrays, here-documents, if, case, groups, scripts within strings (`bash -c "..."`), and other
scripts that it starts or sources, if they are among the files, functions where they are called, and loops whose
conditions or items are known. The output of commands is not followed, nor are other loops, which notes report.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

from shardwright.config.phrase import say
from shardwright.interchange.reading.batch_options import options_of_lines, options_of_words, variables_of
from shardwright.interchange.reading.followed_text import FollowedText
from shardwright.interchange.reading.shell_commands import Command
from shardwright.interchange.reading.shell_marks import unknown_names
from shardwright.interchange.reading.shell_skipped import SkippedPart
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import ShellFault, ShellReader

_ASSIGNED = re.compile(r"(?<![\w$])([A-Za-z_][A-Za-z0-9_]*)=")  # in an expression such as s/^SIZE=.*/SIZE=4/
_NO_SCRIPTS = (".json", ".yaml", ".yml", ".toml", ".py")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".pbs")
_MOST_STEPS, _MOST_LEVELS = 20_000, 10
_COPIED_IN_A_STEP = 32  # variables that are copied in the time of a command


@dataclass
class Script:
    """The result of following a script. `files` are other scripts by name, without folders."""

    variables: Variables
    files: dict[str, str] = field(default_factory=dict)
    present: frozenset[str] = frozenset()  # names of all files that are there
    commands: list[Command] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # texts of files that here-documents write, by name
    batch: dict[str, str] = field(default_factory=dict)  # options of the batch system
    notes: list[str] = field(default_factory=list)
    functions: dict[str, SkippedPart] = field(default_factory=dict)
    launchers: tuple[str, ...] = ()  # the words of those that start what is followed
    steps: int = 0
    ended_on: int = 0  # the line of the `exit` that ended it; 0 if none did
    paths: Mapping[str, str] = field(default_factory=dict)  # the other scripts by path, which may share a name

    def follow(self, text: str, depth: int = 0) -> None:
        """Follow a script. Raises ShellFault."""
        if depth > _MOST_LEVELS:
            raise ShellFault(
                say("scripts within scripts, more than {most} levels deep; name the innermost one", most=_MOST_LEVELS)
            )
        options, variables = options_of_lines(text)
        self._put_batch(options)
        for name, value in variables.items():
            self.variables.values.setdefault(name, value)
        self.variables.values.setdefault("#", "0")
        FollowedText(self, ShellReader(text).read(), depth).all()

    def script_text(self, word: str) -> str:
        """The text of the script that a word names; of several with its name, the one whose path ends most like it."""
        path = PurePath(word)
        alike = [name for name in self.paths if PurePath(name).name == path.name]
        if len(alike) < 2:
            return self.files[path.name]
        return self.paths[max(alike, key=lambda name: _num_alike(PurePath(name).parts[::-1], path.parts[::-1]))]

    def has_script(self, word: str) -> bool:
        """True if a word of a command names one of the other scripts."""
        path = PurePath(word)
        return path.name in self.files and path.suffix.lower() not in _NO_SCRIPTS

    def write(self, path: str, text: str, appends: bool) -> None:
        """Keep the text that the script writes into a file, which it may start or name afterwards."""
        before = self.written.get(path, "") if appends else ""
        self.written[path] = before + ("\n" if before and not before.endswith("\n") else "") + text
        name = PurePath(path).name
        suffix = PurePath(path).suffix.lower()
        if name and (suffix in _SCRIPTS or (suffix not in _NO_SCRIPTS and not unknown_names(name))):
            self.files[name] = self.written[path]

    def change(self, line: int, paths: Sequence[str], words: Sequence[str]) -> None:
        """Make unknown what a command writes into other scripts: the variables whose assignments are in its words."""
        names = {name for word in words for name in _ASSIGNED.findall(word)}
        for name in [PurePath(path).name for path in paths]:
            for variable in names:
                assignment = re.compile(rf"^([ \t]*(?:export[ \t]+)?{variable}=).*$", re.MULTILINE)
                self.files[name] = assignment.sub(rf"\1${variable}", self.files[name])
            self.notes.append(
                say("line {line}: {file} is changed before it is started, which is not followed", line=line, file=name)
            )

    def start(self, text: str, depth: int, arguments: Sequence[str]) -> None:
        """Follow a script that another one starts with arguments. Raises ShellFault."""
        with self.apart():
            self.source(text, depth, arguments)

    def source(self, text: str, depth: int, arguments: Sequence[str]) -> None:
        """Follow a script that another one sources with arguments. Raises ShellFault."""
        with self._arguments(arguments):
            self.follow(text, depth)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have a shell of its own, such as that of a script that is started: nothing that it sets is seen outside."""
        self.count_copies()
        state = self.variables.state()
        try:
            yield
        finally:
            self.variables.return_to(state)

    def call(self, function: SkippedPart, depth: int, arguments: Sequence[str]) -> bool:
        """Follow the body of a function. True if it ends the script. Raises ShellFault."""
        if depth > _MOST_LEVELS:
            self.doubt(function)
            return False
        outer = dict(self.variables.values)
        with self._arguments(arguments):
            body = FollowedText(self, function.body, depth)
            body.all()
        for name in body.local_names:
            self.variables.restore(name, outer)
        return body.ended and not body.returned

    @contextmanager
    def _arguments(self, words: Sequence[str]) -> Iterator[None]:
        """Have arguments; those that nobody gave, as "$@", are handed on as they are: unknown."""
        if not words and not self.variables.has_arguments:
            yield
            return
        with self.variables.arguments(words):
            yield

    @contextmanager
    def launched_by(self, words: Sequence[str]) -> Iterator[None]:
        """Have further words of launchers before a script that is followed."""
        outer, self.launchers = self.launchers, (*self.launchers, *words)
        try:
            yield
        finally:
            self.launchers = outer

    def count_steps(self, number: int) -> None:
        """Count work. Raises ShellFault above a limit."""
        self.steps += number
        if self.steps > _MOST_STEPS:
            raise ShellFault(say("more than {most:,} commands; check that it is the launch script", most=_MOST_STEPS))

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

    def note_unknown_item(self, line: int, item: str) -> None:
        """Note that a loop goes through something unknown."""
        ways = " ".join(f"--set {name}=VALUE" for name in unknown_names(item))
        self.notes.append(say("line {line}: a loop goes through what is unknown; say it: {ways}", line=line, ways=ways))

    def batch_options(self, words: Sequence[str]) -> None:
        """Keep the options of sbatch or srun that give the size of the job."""
        self._put_batch(options_of_words(words))

    def _put_batch(self, options: Mapping[str, str]) -> None:
        for name, value in options.items():
            self.batch.setdefault(name, value)
        for name, value in variables_of(self.batch).items():
            self.variables.values.setdefault(name, value)


def _num_alike(parts: Sequence[str], others: Sequence[str]) -> int:
    """How many parts at the beginning of two paths, written from their ends, are the same."""
    return next(
        (count for count, pair in enumerate(zip(parts, others, strict=False)) if pair[0] != pair[1]), len(others)
    )
