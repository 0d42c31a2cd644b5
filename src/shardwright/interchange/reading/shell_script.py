"""A launch script, followed without running it: its variables, conditions and commands.

Followed are assignments, arrays, here-documents, if, case, groups, scripts within strings (`bash -c "..."`), and other
scripts that it starts or sources, if they are among the files, functions where they are called, and loops whose
conditions or items are known. The output of commands is not followed, nor are other loops, which notes report.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import PurePath

from shardwright.config.phrase import say
from shardwright.interchange.reading.batch_options import options_of_lines, options_of_words, variables_of
from shardwright.interchange.reading.file_signs import is_configuration
from shardwright.interchange.reading.followed_text import FollowedText
from shardwright.interchange.reading.shell_commands import Command
from shardwright.interchange.reading.shell_marks import unknown_names
from shardwright.interchange.reading.shell_pipes import Given, Printed
from shardwright.interchange.reading.shell_regexes import MATCHED
from shardwright.interchange.reading.shell_skipped import SkippedPart
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import ShellFault, ShellReader

_ASSIGNED = re.compile(r"(?<![\w$])([A-Za-z_][A-Za-z0-9_]*)=")  # in an expression such as s/^SIZE=.*/SIZE=4/
_NO_SCRIPTS = (".json", ".yaml", ".yml", ".toml", ".py")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".pbs")
_MOST_STEPS, _MOST_LEVELS = 20_000, 10
_CHARS_IN_A_STEP = 512  # characters that are printed in the time of a command
_COPIED_IN_A_STEP = 32  # variables that are copied in the time of a command

_COMMENTED = re.compile(r"(?m)^[ \t]*#[# \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=")


@dataclass(frozen=True)
class Called:
    """The end of a function: with the script, if it succeeds (None if that is unknown), and as the outermost
    command."""

    ends_script: bool = False
    succeeds: bool | None = None
    is_aborted: bool = False


@dataclass
class Script:
    """The result of following a script. `files` are other scripts by name, without folders."""

    variables: Variables
    files: dict[str, str] = field(default_factory=dict)
    present: frozenset[str] = frozenset()  # names of all files that are there
    commands: list[Command] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # texts of files that here-documents write, by name
    lost: dict[str, int] = field(default_factory=dict)  # configurations that are changed in an unknown way: their lines
    changed: dict[str, int] = field(default_factory=dict)  # scripts that are so changed: the line of the first change
    unended: frozenset[str] = frozenset()  # names of `written` files whose last lines have no end
    batch: dict[str, str] = field(default_factory=dict)  # options of the batch system
    notes: list[str] = field(default_factory=list)
    functions: dict[str, SkippedPart] = field(default_factory=dict)
    commented: set[str] = field(default_factory=set)  # names of variables that comments would set
    launchers: tuple[str, ...] = ()  # the words of those that start what is followed
    steps: int = 0
    num_doubts: int = 0  # parts of which it is unknown what they do
    level: int = 0  # how deep in others the text is that is followed
    printed: Printed | None = None  # what is printed now, if it is used
    given: Given | None = None  # what commands read now, if it is known
    ended_on: int = 0  # the line of the `exit` that ended it; 0 if none did
    paths: Mapping[str, str] = field(default_factory=dict)  # the other scripts by path, which may share a name

    def __post_init__(self) -> None:
        """Give expansions the output of commands that are followed."""
        self.variables.output_of = self.output_of

    def follow(self, text: str, depth: int = 0) -> None:
        """Follow a script. Raises ShellFault."""
        if depth > _MOST_LEVELS:
            raise ShellFault(
                say("scripts within scripts, more than {most} levels deep; name the innermost one", most=_MOST_LEVELS)
            )
        options, variables = options_of_lines(text)
        self._put_batch(options)
        self.commented.update(_COMMENTED.findall(text))
        for name, value in variables.items():
            self.variables.values.setdefault(name, value)
        self.variables.values.setdefault("#", "0")
        self.variables.values.setdefault(MATCHED, [])
        FollowedText(self, ShellReader(text).read(), depth).all()

    def output_of(self, text: str) -> str | None:
        """Output of the commands of an expansion, without the ends of the last lines; None if it is unknown."""
        printed = self.printed_by_commands(text)
        return None if printed is None else printed.rstrip("\n")

    def printed_by_commands(self, text: str) -> str | None:
        """Output of commands in a shell of their own; None if it is unknown."""
        state = (dict(self.functions), dict(self.written), dict(self.files), dict(self.batch))
        num_commands, num_notes, ended_on = len(self.commands), len(self.notes), self.ended_on
        is_known, succeeds = self.level < _MOST_LEVELS, None
        with self.apart(), self.printing(Printed()) as printed:
            try:
                if is_known:
                    succeeds = FollowedText(self, ShellReader(text).read(), self.level + 1).all()
            except ShellFault:  # asked for if a setting depends on it
                is_known = False
            # A note tells of something taken as most have it, and a started program prints what nobody knows.
            is_known = is_known and (len(self.commands), len(self.notes)) == (num_commands, num_notes)
        self.count_text(printed)
        self.functions, self.written, self.files, self.batch = state
        del self.commands[num_commands:], self.notes[num_notes:]
        self.ended_on = ended_on
        if not is_known or printed.text is None:
            return None
        self.variables.substituted = succeeds
        return printed.text

    @contextmanager
    def printing(self, printed: Printed | None) -> Iterator[Printed]:
        """Keep what commands print."""
        outer, self.printed = self.printed, printed
        try:
            yield printed or Printed()
        finally:
            self.printed = outer

    @contextmanager
    def reading(self, given: Given | None) -> Iterator[None]:
        """Have a text that commands read; None if it is unknown."""
        outer, self.given = self.given, given
        try:
            yield
        finally:
            self.given = outer

    def script_text(self, word: str) -> str:
        """The text of the script that a word starts; of several with its name, the one whose path ends most like it.
        A note tells of one that was changed."""
        path = PurePath(word)
        if line := self.changed.pop(path.name, 0):
            self.notes.append(
                say(
                    "line {line}: {file} is changed before it is started, which is not followed",
                    line=line,
                    file=path.name,
                )
            )
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
        if path.startswith("/dev/"):
            return
        self.lost.pop(PurePath(path).name, None)
        before = self.written.get(path, "") if appends else ""
        between = "\n" if before and not before.endswith("\n") and path not in self.unended else ""
        self.written[path] = before + between + text.removesuffix("\n")
        self.unended = self.unended - {path} if text.endswith("\n") else self.unended | {path}
        name = PurePath(path).name
        suffix = PurePath(path).suffix.lower()
        if name and (suffix in _SCRIPTS or (suffix not in _NO_SCRIPTS and not unknown_names(name))):
            self.files[name] = self.written[path]

    def text_of_file(self, path: str) -> str | None:
        """The text of a file that the script writes, or of one beside it, with the end of its last line."""
        text = self.written.get(path, self.files.get(PurePath(path).name))
        return text if text is None or text.endswith("\n") else f"{text}\n"

    def lose(self, line: int, path: str) -> None:
        """Note that a command writes what is unknown into a configuration."""
        self.written.pop(path, None)
        if is_configuration(path):
            self.lost[PurePath(path).name] = line

    def change(self, line: int, paths: Sequence[str], words: Sequence[str]) -> None:
        """Make unknown what a command writes into other scripts, which may be started afterwards: the variables whose
        assignments are in its words, or all that they assign."""
        names = {name for word in words for name in _ASSIGNED.findall(word)}
        for name in [PurePath(path).name for path in paths]:
            for variable in names or {*_ASSIGNED.findall(self.files[name])}:
                assignment = re.compile(rf"^([ \t]*(?:export[ \t]+)?{variable}=).*$", re.MULTILINE)
                self.files[name] = assignment.sub(rf"\1${variable}", self.files[name])
            self.changed.setdefault(name, line)

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

    def call(self, function: SkippedPart, depth: int, arguments: Sequence[str] | None) -> Called:
        """Follow the body of a function with arguments; None for those of the script, which nobody gave. Raises
        ShellFault."""
        if depth > _MOST_LEVELS:
            self.doubt(function)
            return Called()
        outer, num_doubts, num_notes = dict(self.variables.values), self.num_doubts, len(self.notes)
        with self.variables.arguments(arguments) if arguments is not None else nullcontext():
            body = FollowedText(self, function.body, depth, is_function=True)
            succeeds = body.all()
        for name in body.local_names:
            self.variables.restore(name, outer)
        is_known = (self.num_doubts, len(self.notes)) == (num_doubts, num_notes)
        return Called(body.ended and not body.returned, succeeds if is_known else None, body.is_aborted)

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

    def count_text(self, printed: Printed) -> None:
        """Count text that is printed as work. Raises ShellFault above a limit."""
        self.count_steps(printed.num_chars // _CHARS_IN_A_STEP)

    def count_copies(self) -> None:
        """Count a copy of all variables as work. Raises ShellFault above a limit."""
        self.count_steps(len(self.variables.values) // _COPIED_IN_A_STEP)

    def doubt(self, part: SkippedPart) -> None:
        """Make unknown what a skipped part would set and print, and what the functions that it calls would set."""
        self.num_doubts += 1
        if self.printed is not None:
            self.printed.write(None)
        parts, seen = [part], set[str]()
        while parts:
            skipped = parts.pop()
            for name, appends in skipped.sets.items():
                self.variables.doubt(name, appends)
            parts += [self.functions[name] for name in skipped.calls - seen if name in self.functions]
            seen |= skipped.calls

    def doubt_all(self) -> None:
        """Make unknown what a file of settings could set that is not there: each variable, and those with defaults."""
        for name in [name for name in self.variables.values if name.isidentifier() and name.isascii()]:
            value = self.variables.values[name]
            is_program = isinstance(value, str) and value.endswith((".py", *_SCRIPTS))
            if name != "IFS" and not is_program and name not in variables_of(self.batch):
                self.variables.doubt(name, appends=False)
        self.variables.is_open = True

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
    """The number of equal parts at the beginning of two paths that are written from their ends."""
    return next(
        (count for count, pair in enumerate(zip(parts, others, strict=False)) if pair[0] != pair[1]), len(others)
    )
