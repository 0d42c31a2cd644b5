"""The effects of a script's commands on its variables, files and batch options, as far as they are known."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.reading.shell_arithmetic import changed_names
from shardwright.interchange.reading.shell_conditions import EQUALITIES, is_true
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark, readable, unknown_names
from shardwright.interchange.reading.shell_reading import values_read
from shardwright.interchange.reading.shell_skipped import DECLARING, LOCAL, READING, assigned, element_index, is_name
from shardwright.interchange.reading.shell_words import Token, WordPiece

if TYPE_CHECKING:
    from shardwright.interchange.reading.shell_script import Script

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
# Commands that do something with files that they name, and start none.
_OF_FILES = (
    "awk",
    "cat",
    "chmod",
    "cp",
    "diff",
    "dos2unix",
    "grep",
    "head",
    "ln",
    "ls",
    "mv",
    "rm",
    "scp",
    "sed",
    "tail",
    "touch",
)
_SCRIPT_OPTIONS = ("-c", "-lc", "-xc", "-ec", "-ic", "-lic", "--wrap")  # of a shell or of sbatch, before a script
_SUBMITTED = re.compile(r"\s*(?:\w+=\S*\s+){0,8}(?:[\w./-]*/)?(?:sbatch|qsub|bsub|torchrun|deepspeed|accelerate)\s")
_BEFORE = ("time", "command", "builtin")  # words before a command, which runs as without them
_SOURCING = ("source", ".")
_HOOKS = re.compile("conda|mamba|hook|ssh-agent|modulecmd|brew|env_init")  # commands that prepare a shell


@dataclass(frozen=True)
class Command:
    """A command that the script runs, with expanded words."""

    line: int
    words: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)  # of the script then, without arrays
    launchers: tuple[str, ...] = ()  # the words before a script that has the command: mpirun -np 8 bash -c


def _is_started(words: list[str], place: int, script: "Script") -> bool:
    """True if a word of a command names a script that it starts: a file without the ending of one, such as a list of
    hosts, that stands behind an option is its value."""
    if not script.has_script(words[place]) or PurePath(words[place]).suffix:
        return script.has_script(words[place])
    is_of_shell = any(PurePath(word).name in ("bash", "sh", "source", ".") for word in words[:place])
    return is_of_shell or place == 0 or not words[place - 1].startswith("-")


def _ends_in_shell(words: list[str]) -> bool:
    """True if a command starts a shell at its end, which reads what stands behind it: apptainer exec IMAGE bash -s."""
    plain = [word for word in words if not word.startswith("-")]
    return len(plain) > 1 and PurePath(plain[-1]).name in ("bash", "sh")


class CommandEffects:
    """The effects of the commands of one text, which is nested `depth` levels in others. `ended` is True after exit."""

    def __init__(self, script: "Script", depth: int) -> None:
        self.script, self.depth, self.ended = script, depth, False
        self.returned = False  # ended by `return`
        self.num_jumped = 1  # loops that `jump` ends
        self.jump = ""  # "break" or "continue", which end the body of a loop
        self.local_names: list[str] = []  # variables that a function has for itself

    def apply(self, line: int, tokens: list[Token], redirected: dict[str, Token]) -> bool | None:
        """Apply a command with its assignments and redirections. True if it succeeds; None if that is unknown."""
        variables = self.script.variables
        tokens_left = [token for token in tokens if token.pieces]
        while len(tokens_left) > 1 and tokens_left[0].plain in _BEFORE and not tokens_left[1].plain.startswith("-"):
            tokens_left = tokens_left[1:]
        self._submit(tokens_left)
        if len(tokens_left) == 1 and [piece.kind for piece in tokens_left[0].pieces] == ["arithmetic"]:
            return self._arithmetic(tokens_left[0].pieces[0].text)
        if tokens_left and tokens_left[0].plain in DECLARING:
            return self._declare(line, tokens_left[0].plain, tokens_left[1:])
        num_assigned = next((i for i, token in enumerate(tokens_left) if not assigned(token)), len(tokens_left))
        prefix, command = tokens_left[:num_assigned], tokens_left[num_assigned:]
        prefixed = [assignment[0] for token in prefix if (assignment := assigned(token))]
        # A shell expands the words of a command before its prefix (A=1 command) is set, for this command alone.
        words = [word for token in command for word in variables.words_of(token)]
        if command and command[0].plain == "[[":
            pairs = zip(["", *(token.plain for token in command)], command, strict=False)
            words = [
                word
                for before, token in pairs
                for word in ([variables.pattern_of(token)] if before in EQUALITIES else variables.words_of(token))
            ]
        values = {name: variables.values[name] for name in prefixed if name in variables.values}
        for token in prefix:
            self._assign(token)
        try:
            return self._run(line, words, redirected)
        finally:
            for name in prefixed if command else ():
                variables.restore(name, values)

    def _submit(self, tokens: list[Token]) -> None:
        """Follow what commands submit or start whose output is a part of some words: JOB=$(sbatch run.slurm)."""
        for piece in (piece for token in tokens for piece in token.pieces):
            if piece.kind == "command" and _SUBMITTED.match(piece.text):
                with self.script.apart():
                    self.script.follow(piece.text, self.depth + 1)

    def _declare(self, line: int, command: str, tokens: list[Token]) -> bool:
        """Declare variables, with values or without."""
        variables = self.script.variables
        options = "".join(token.plain for token in tokens if token.plain.startswith("-")) if command in LOCAL else ""
        for token in tokens:
            name, _ = assigned(token) or (token.plain, False)
            if command in LOCAL and "g" not in options and is_name(name):
                self.local_names.append(name)
            if "i" in options and is_name(name):
                variables.integers.add(name)
            if {*"ulc"} & {*options} and is_name(name):  # letters of another case
                variables.changed.add(name)
            if assigned(token):
                self._assign(token)
            elif not token.plain:
                self._declare_expanded(line, command, token)
            if command == "readonly" and is_name(name):
                variables.kept |= {name} & variables.values.keys()
            if "n" in options and is_name(name):  # another name of a variable, which may be changed by it
                target = variables.values.get(name)
                for doubted in (name, target if isinstance(target, str) and is_name(target) else name):
                    variables.doubt(doubted, appends=False)
        return True

    def _declare_expanded(self, line: int, command: str, token: Token) -> None:
        """Set the variables of words that have to be expanded: export "$NAME=VALUE" and export $(cat FILE)."""
        variables = self.script.variables
        for word in variables.words_of(token):
            name, equals, value = word.partition("=")
            if equals and is_name(name):
                variables.put(name, variables.with_own_mark(name, value))
            elif any(map(variables.is_made, unknown_names(name))):
                self._note_unread(line, [command, word])

    def _note_unread(self, line: int, words: list[str]) -> None:
        """Note a command that sets what is not read here."""
        self.script.notes.append(
            say(
                "line {line}: {command} is not read: name that file too",
                line=line,
                command=shortened(readable(" ".join(words[:2]))),
            )
        )

    def _run(self, line: int, words: list[str], redirected: dict[str, Token]) -> bool | None:
        """Run a command with expanded words."""
        variables, script = self.script.variables, self.script
        document = next((redirected[name].document for name in ("<<", "<<-") if name in redirected), None)
        if document is not None:
            token = redirected.get("<<") or redirected["<<-"]
            text = variables.document_of(document) if token.expands else document
            return self._document(line, words, text, redirected)
        if "<<<" in redirected and words and words[0] in (*READING, *_SOURCING):
            return self._document(line, words, variables.text_of(redirected["<<<"]), redirected)
        target = redirected.get(">") or redirected.get(">>")
        if words and target is not None:
            self._print(line, words, variables.text_of(target), ">>" in redirected)
        return self._command(line, words, script) if words else True

    def _print(self, line: int, words: list[str], path: str, appends: bool) -> None:
        """Keep the output of `echo` that goes into a file, or note another command that changes a script."""
        is_plain = words[0] == "echo" and not any("\\" in word for word in words)
        if is_plain:
            arguments = words[1 + (words[1:2] in (["-e"], ["-n"])) :]
            self.script.write(path, " ".join(arguments) + "\n", appends)
        elif path in self.script.written and self.script.has_script(path):
            self.script.change(line, [path], words)

    def _arithmetic(self, text: str) -> bool | None:
        """The truth of (( ... )); None if it is unknown. Variables that it assigns become unknown."""
        variables = self.script.variables
        if changed := changed_names(text):
            for name in changed:
                variables.doubt(name, appends=False)
            return None
        value = variables.arithmetic(text)
        return None if unknown_names(value) else value != "0"

    def _assign(self, token: Token) -> None:
        name, appends = assigned(token) or ("", False)
        first_piece = token.pieces[0]
        pieces = (WordPiece("text", first_piece.text[first_piece.text.index("=") + 1 :], False), *token.pieces[1:])
        value = self.script.variables.text_of(Token(token.line, pieces=pieces))
        if index := element_index(token):
            self.script.variables.put_element(
                name, index.strip("'\""), value, appends=first_piece.text.partition("=")[0].endswith("+")
            )
            return
        if name in self.script.variables.integers and value.strip():
            sum_of = f"{name}+({value})" if appends and name in self.script.variables.values else value
            value, appends = self.script.variables.arithmetic(sum_of), False
        if value != mark(name) or name in self.script.variables.values:  # NAME=$NAME: who starts the script gives it
            self.script.variables.put(name, self.script.variables.with_own_mark(name, value), appends)

    def _document(self, line: int, words: list[str], text: str, redirected: dict[str, Token]) -> bool | None:
        """Run a command that reads a text of the script."""
        variables = self.script.variables
        target = redirected.get(">") or redirected.get(">>")
        if words and words[0] == "tee":
            for word in (word for word in words[1:] if not word.startswith("-")):
                self.script.write(word, text, appends="-a" in words)
        elif target is not None:
            self.script.write(self.script.variables.text_of(target), text, appends=">>" in redirected)
        elif words and words[0] in READING:
            for name, value in values_read(words, text, variables.separators).items():
                if value is None:
                    variables.doubt(name, appends=False)
                else:
                    variables.put(name, value)
        elif words and words[0] in _SOURCING:
            self.script.follow(text, self.depth + 1)
        elif words and (PurePath(words[0]).name in ("sbatch", "bash", "sh", "srun") or _ends_in_shell(words)):
            self.script.batch_options([part for word in words for part in word.split("=", 1)])
            with self.script.apart():
                self.script.follow(text, self.depth + 1)
        else:
            return self._command(line, words, self.script) if words else True
        return True

    def _command(self, line: int, words: list[str], script: "Script") -> bool | None:
        name = PurePath(words[0]).name or words[0]
        if name in ("[", "[[", "test"):
            return is_true([word for word in words[1:] if word not in ("]", "]]")], script.variables.values)
        if name in ("exit", "return", "break", "continue"):
            self.ended, self.returned = True, name == "return"
            self.jump = name if name in ("break", "continue") else ""
            self.num_jumped = (whole(words[1]) or 1) if self.jump and len(words) > 1 else 1
            script.ended_on = line if name == "exit" else script.ended_on
            return True
        if name == "shift":
            script.variables.shift(whole(words[1]) or 0 if len(words) > 1 else 1)
            return True
        if name == "set" and "--" in words:
            script.variables.set_arguments(words[words.index("--") + 1 :])
            return True
        if name in ("false", "true"):
            return name == "true"
        if name == "let" or (name == "printf" and words[1:2] == ["-v"]):
            changed = words[2:3] if name == "printf" else [name for word in words[1:] for name in changed_names(word)]
            for word in filter(is_name, changed):
                script.variables.doubt(word, appends=False)
            return None
        if name in _WITHOUT_EFFECT:
            return True
        if name == "unset":
            for word in words[1:] if "-f" not in words else ():
                script.variables.values.pop(word, None)
                if word.endswith("]"):  # an element of an array
                    script.variables.doubt(word.partition("[")[0], appends=False)
            return True
        if name == "eval":
            text = " ".join(words[1:]).strip()
            if (output := UNKNOWN.match(text)) and output[1] in script.variables.expansions:
                if not _HOOKS.search(output[1]):
                    self._note_unread(line, words)
                return None
            script.follow(text, self.depth + 1)
            return True
        if name in READING:
            for word in words[1:]:
                if is_name(word):
                    script.variables.doubt(word, appends=False)
            return None
        if name in script.functions:
            self.ended = script.call(script.functions[name], self.depth + 1, words[1:])
            return None
        if name in ("sbatch", "srun", "salloc"):
            script.batch_options([part for word in words for part in word.split("=", 1)])
        if name in _OF_FILES:
            changed = [word for word in words if script.has_script(word)]
            if name == "sed" and any(word.startswith(("-i", "--in-place")) for word in words):
                script.change(line, changed, words)
            return None
        return self._started(line, words, script)

    def _started(self, line: int, words: list[str], script: "Script") -> bool | None:
        """Follow the script that a command sources or starts; without one, record the command."""
        is_sourced = (PurePath(words[0]).name or words[0]) in _SOURCING
        place = next((place for place, _ in enumerate(words) if _is_started(words, place, script)), None)
        if place is not None:
            text, arguments = script.script_text(words[place]), words[place + 1 :]
            with script.launched_by(() if is_sourced else words[:place]):
                if is_sourced and not arguments:
                    script.follow(text, self.depth + 1)
                elif is_sourced:
                    script.source(text, self.depth + 1, arguments)
                else:
                    script.start(text, self.depth + 1, arguments)
        elif is_sourced:
            self._note_unread(line, words)
        else:
            return self._other_command(line, words, script)
        return True

    def _other_command(self, line: int, words: list[str], script: "Script") -> bool | None:
        """Record a command, whose result is unknown, or follow the script within one of its words."""
        is_python = any(PurePath(word).name.startswith("python") for word in words)
        is_program = False  # the words behind a program in Python are its own
        for previous, word in zip(["", *words], words, strict=False):
            is_script = (previous in _SCRIPT_OPTIONS and not is_python) or (
                " --" in word and ".py" in word and not is_program
            )
            is_program = is_program or word.endswith(".py")
            if is_script and any(separator in word for separator in " \n"):
                with script.launched_by(words[: words.index(word)]), script.apart():
                    script.follow(word, self.depth + 1)
                return True
        script.count_copies()
        script.commands.append(Command(line, words, script.variables.texts(), script.launchers))
        return None
