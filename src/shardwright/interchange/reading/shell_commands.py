"""The effects of a script's commands on its variables, files and batch options, as far as they are known."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardwright.config.fault_gathering_reader import whole
from shardwright.interchange.reading.command_texts import PRINTING, CommandTexts
from shardwright.interchange.reading.shell_assignments import value_with_changes
from shardwright.interchange.reading.shell_braces import braced
from shardwright.interchange.reading.shell_conditions import EQUALITIES, is_true, regex_of
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark, unknown_names
from shardwright.interchange.reading.shell_outputs import printed
from shardwright.interchange.reading.shell_pipes import FILTERS, SILENT
from shardwright.interchange.reading.shell_regexes import REGEX
from shardwright.interchange.reading.shell_skipped import (
    CASE_OPTION,
    DECLARING,
    LOCAL,
    READING,
    assigned,
    assigned_element,
    is_name,
)
from shardwright.interchange.reading.shell_words import Token, WordPiece

if TYPE_CHECKING:
    from shardwright.interchange.reading.shell_script import Script

_WITHOUT_EFFECT = (
    "mkdir",
    "set",
    "cd",
    "clear",
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
# Names of files that set variables of a job, other than those that prepare a shell.
_OF_SETTINGS = re.compile(
    r"(?i)^(?!.*(?:set_?env|setup|activate|init))(?:.*[._-])?(?:env|config|conf|param|arg|argument|setting|var|variable|common|hparam|option)s?"
    r"(?:[._-]|$)"
)
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


class CommandEffects(CommandTexts):
    """The effects of the commands of one text, which is nested `depth` levels in others. `ended` is True after exit."""

    def __init__(self, script: "Script", depth: int) -> None:
        super().__init__(script)
        self.depth, self.ended = depth, False
        self.returned = False  # ended by `return`
        self.hands_on = False  # if the arguments that nobody gave are those of the command, as "$@"
        self.is_aborted = False  # ended by a new value of a variable that is final
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
        is_given = any(
            piece.kind == "variable" and piece.text[:1] in ("@", "*") for token in command for piece in token.pieces
        )
        self.hands_on = is_given and not variables.has_arguments and len(words) == 1
        if command and command[0].plain == "[[":
            expanded = dict.fromkeys(EQUALITIES, variables.pattern_of)
            expanded[REGEX] = lambda token: regex_of(token, variables)
            pairs = zip(["", *(token.plain for token in command)], command, strict=False)
            words = [word for before, token in pairs for word in (expanded.get(before, variables.text_of)(token),)]
        values = {name: variables.values[name] for name in prefixed if name in variables.values}
        if prefix and "<<<" in redirected:  # expanded before, too
            text = variables.text_of(redirected["<<<"])
            redirected = redirected | {"<<<": Token(line, pieces=(WordPiece("text", text, True),))}
        variables.substituted = True
        for token in prefix:
            self._assign(token)
        if not command and not redirected:
            return variables.substituted
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

    def _declare(self, line: int, command: str, tokens: list[Token]) -> bool | None:
        """Declare variables, with values or without. None if one has a final value."""
        variables = self.script.variables
        is_set: bool | None = True
        options = "".join(token.plain for token in tokens if token.plain.startswith("-")) if command in LOCAL else ""
        for token in (one for declared in tokens for one in braced(declared)):
            name, _ = assigned(token) or (token.plain, False)
            if command in LOCAL and "g" not in options and is_name(name):
                self.local_names.append(name)
            if "i" in options and is_name(name):
                variables.integers.add(name)
            if {*"ulc"} & {*options} and is_name(name):  # letters of another case
                variables.changed.add(name)
            if assigned(token) and name in variables.kept:
                is_set = None
            elif assigned(token):
                self._assign(token)
            elif not token.plain:
                self._declare_expanded(line, command, token)
            if command == "readonly" and is_name(name):
                variables.kept |= {name} & variables.values.keys()
            if "n" in options and is_name(name):  # another name of a variable, which may be changed by it
                target = variables.values.get(name)
                for doubted in (name, target if isinstance(target, str) and is_name(target) else name):
                    variables.doubt(doubted, appends=False)
        return is_set

    def _declare_expanded(self, line: int, command: str, token: Token) -> None:
        """Set the variables of words that have to be expanded: export "$NAME=VALUE" and export $(cat FILE)."""
        variables = self.script.variables
        for word in variables.words_of(token):
            name, equals, value = word.partition("=")
            if equals and is_name(name):
                variables.put(name, variables.with_own_mark(name, value))
            elif any(map(variables.is_made, unknown_names(name))):
                self.note_unread(line, [command, word])

    def _run(self, line: int, words: list[str], redirected: dict[str, Token]) -> bool | None:
        """Run a command with expanded words."""
        with self.redirected(line, words, redirected):
            return self._read(line, words, redirected)

    def _read(self, line: int, words: list[str], redirected: dict[str, Token]) -> bool | None:
        """Run a command that may read a text of the script."""
        has_text = bool({"<<<", "<<", "<<-"} & redirected.keys())
        if not words:
            return True
        if has_text and self.script.given is not None and words[0] not in READING:
            text = self.script.given.rest or ""
            is_shell = PurePath(words[0]).name in ("sbatch", "bash", "sh", "srun") or _ends_in_shell(words)
            if words[0] in _SOURCING or (is_shell and "<<<" not in redirected):
                return self._follow_text(words, text)
        return self._command(line, words, self.script)

    def _follow_text(self, words: list[str], text: str) -> bool:
        """Follow a text that a command reads as a script."""
        with self.script.reading(None):
            if words[0] in _SOURCING:
                self.script.follow(text, self.depth + 1)
            else:
                self.script.batch_options([part for word in words for part in word.split("=", 1)])
                with self.script.apart():
                    self.script.follow(text, self.depth + 1)
        return True

    def _arithmetic(self, text: str) -> bool | None:
        """The truth of (( ... )), which may change variables; None if it is unknown."""
        value = value_with_changes(text, self.script.variables)
        return None if unknown_names(value) else value != "0"

    def _assign(self, token: Token) -> None:
        variables = self.script.variables
        name, appends = assigned(token) or ("", False)
        if name in variables.kept and name not in variables.fixed:  # which ends the command of the outermost block
            self.ended = self.is_aborted = True
            return
        if element := assigned_element(token):
            index, value = (
                variables.text_of(Token(token.line, pieces=pieces)) for pieces in (element.index, element.value)
            )
            variables.put_element(element.name, index, value, appends=element.appends)
            return
        first_piece = token.pieces[0]
        pieces = (WordPiece("text", first_piece.text[first_piece.text.index("=") + 1 :], False), *token.pieces[1:])
        value = variables.text_of(Token(token.line, pieces=pieces))
        if name in variables.integers:
            value = value if value.strip() else "0"
            sum_of = f"{name}+({value})" if appends and name in variables.values else value
            value, appends = variables.arithmetic(sum_of), False
        if value != mark(name) or name in variables.values:  # NAME=$NAME: who starts the script gives it
            variables.put(name, variables.with_own_mark(name, value), appends)

    def _command(self, line: int, words: list[str], script: "Script") -> bool | None:
        name = PurePath(words[0]).name or words[0]
        if name in ("[", "[[", "test"):
            if name != "[[" and REGEX in words:  # an error there
                return None
            return is_true([word for word in words[1:] if word not in ("]", "]]")], script.variables)
        if name in ("exit", "return", "break", "continue"):
            self.ended, self.returned = True, name == "return"
            self.jump = name if name in ("break", "continue") else ""
            self.num_jumped = (whole(words[1]) or 1) if self.jump and len(words) > 1 else 1
            script.ended_on = line if name == "exit" else script.ended_on
            return True if self.jump else self._ended_with(words)
        if name == "shift":
            script.variables.shift(whole(words[1]) or 0 if len(words) > 1 else 1)
            return True
        if name == "set" and "--" in words:
            script.variables.set_arguments(words[words.index("--") + 1 :])
            return True
        if name in ("false", "true", ":"):
            return name != "false"
        if name == "shopt":
            if "nocasematch" in words and {"-s", "-u"} & {*words}:
                script.variables.values[CASE_OPTION] = "1" if "-s" in words else ""
            return True
        if name == "let" and len(words) > 1:
            return [self._arithmetic(word) for word in words[1:]][-1]
        if name == "printf" and words[1:2] == ["-v"] and len(words) > 2:
            text = None if any(map(unknown_names, words[3:])) else printed(words[3:])
            if is_name(words[2]) and text is not None:
                script.variables.put(words[2], text)
            elif is_name(words[2]):
                script.variables.doubt(words[2], appends=False)
            return None if text is None else True
        return self._further_command(line, words, name, script)

    def _further_command(self, line: int, words: list[str], name: str, script: "Script") -> bool | None:
        """Run a command that prints, changes variables, calls a function, or starts something; `name` has no folder."""
        is_copied = name == "tee" and script.given is not None and bool(script.given.rest)
        if name in FILTERS or name in PRINTING or is_copied:
            text, succeeds = self.printed_by([name, *words[1:]])
            if script.printed is not None:
                script.printed.write(text)
            if succeeds is not None or name in PRINTING:
                return True if name in PRINTING else succeeds
        elif script.printed is not None and name in ("expr", "which", "command"):
            script.printed.write(self.printed_by([name, *words[1:]])[0])
            return None
        elif script.printed is not None and name not in SILENT and name not in script.functions:
            script.printed.write(None)
        if name in _WITHOUT_EFFECT and words[1:2] != ["run"]:  # `conda run` starts a command
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
                    self.note_unread(line, words)
                return None
            script.follow(text, self.depth + 1)
            return True
        if name in READING:
            return self.read_values(words)
        if name in script.functions:
            arguments = None if self.hands_on else words[1:]
            called = script.call(script.functions[name], self.depth + 1, arguments)
            self.ended, self.is_aborted = called.ends_script, called.is_aborted
            return called.succeeds
        if name in ("sbatch", "srun", "salloc"):
            script.batch_options([part for word in words for part in word.split("=", 1)])
        if name == "sed" and any(word.startswith(("-i", "--in-place")) for word in words):
            self.change_in_place(line, words)
        if name in ("cp", "mv", "yq") and len(words) > 2 and (name != "yq" or "-i" in words):
            text = script.text_of_file(words[-2]) if name != "yq" and len(words) == 3 else None
            if text is not None:
                script.write(words[-1], text, appends=False)
            elif name == "yq" or PurePath(words[-2]).name != PurePath(words[-1]).name:
                script.lose(line, words[-1])
        if name in _OF_FILES:
            return None
        return self._started(line, words, script)

    def _ended_with(self, words: list[str]) -> bool | None:
        """True if `exit` or `return` ends with success: by its number, else as the command before."""
        status = words[1] if len(words) > 1 else self.script.variables.values.get("?", "")
        return None if not isinstance(status, str) or whole(status) is None else status == "0"

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
            self.note_unread(line, words)
            output = next(iter(unknown_names(words[1])), "") if len(words) > 1 else ""
            is_output = output in script.variables.expansions and not _HOOKS.search(output)
            if len(words) > 1 and not words[1].startswith("/") and _OF_SETTINGS.search(PurePath(words[1]).name):
                is_output = True
            if is_output:
                script.doubt_all()
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
