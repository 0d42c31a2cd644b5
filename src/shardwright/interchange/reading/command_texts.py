"""Texts that commands of a script read and print, and the files that hold them: pipes, documents, `read`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.reading.file_signs import is_configuration
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.reading.shell_pipes import Given, Printed, printed_by
from shardwright.interchange.reading.shell_reading import values_read
from shardwright.interchange.reading.shell_sed import sed
from shardwright.interchange.reading.shell_skipped import is_name
from shardwright.interchange.reading.shell_words import Token

if TYPE_CHECKING:
    from shardwright.interchange.reading.shell_script import Script

PRINTING = ("echo", "printf", "seq", "basename", "dirname", "pwd")  # commands that always succeed


class CommandTexts:
    """The texts that commands of a script read and print."""

    def __init__(self, script: "Script") -> None:
        self.script = script

    def note_unread(self, line: int, words: list[str]) -> None:
        """Note a command that sets what is not read here."""
        self.script.notes.append(
            say(
                "line {line}: {command} is not read: name that file too",
                line=line,
                command=shortened(readable(" ".join(words[:2]))),
            )
        )

    @contextmanager
    def redirected(self, line: int, words: list[str], redirected: dict[str, Token]) -> Iterator[None]:
        """Have what commands read and print as redirections say, and keep what goes into a file."""
        with self.script.reading(self._given(redirected)):
            target = next((redirected[sign] for sign in (">", ">>", "&>", ">&") if sign in redirected), None)
            if target is None or target.plain == "1":
                yield
                return
            with self.script.printing(Printed()) as printed:
                yield
            if words and target.plain not in ("1", "2"):
                path = self.script.variables.text_of(target)
                self._keep(line, words, path, printed, appends=">>" in redirected)

    def _given(self, redirected: dict[str, Token]) -> Given | None:
        """Text that a command reads, by its redirections; None if it is unknown."""
        variables, script = self.script.variables, self.script
        if token := redirected.get("<<<"):
            return Given(variables.text_of(token) + "\n")
        token = redirected.get("<<") or redirected.get("<<-")
        if token is not None and token.document is not None:
            text = variables.document_of(token.document) if token.expands else token.document
            return Given(text + "\n" if text else "")
        if token := redirected.get("<"):
            if [piece.kind for piece in token.pieces] == ["process"]:
                output = script.printed_by_commands(token.pieces[0].text)
                return None if output is None else Given(output)
            content = script.text_of_file(variables.text_of(token))
            return None if content is None else Given(content)
        return script.given

    def _keep(self, line: int, words: list[str], path: str, printed: Printed, *, appends: bool) -> None:
        """Keep what a command prints into a file, or note another command that changes a script."""
        is_known = bool(printed.parts) or words[0] in (":", *PRINTING)
        if is_known and printed.text is not None:
            self.script.write(path, printed.text, appends)
        elif path in self.script.written and self.script.has_script(path):
            self.script.change(line, [path], words)
        else:
            self.script.lose(line, path)

    def change_in_place(self, line: int, words: list[str]) -> None:
        """Apply `sed -i` to files that are known, or note that they are changed."""
        plain = [word for word in words[1:] if not word.startswith(("-i", "--in-place"))]
        paths = [word for word in plain if self.script.text_of_file(word) is not None]
        changed = []
        for path in paths:
            text = sed([word for word in plain if word not in paths], self.script.text_of_file(path) or "")
            if text is None or any(map(unknown_names, plain)):
                changed.append(path)
            else:
                self.script.write(path, text, appends=False)
                self.script.files[PurePath(path).name] = text
        for path in [word for word in plain if word in changed or is_configuration(word)]:
            if path not in paths or path in changed:
                self.script.lose(line, path)
        if scripts := [path for path in changed if self.script.has_script(path)]:
            self.script.change(line, scripts, words)

    def read_values(self, words: list[str]) -> bool | None:
        """Set the variables that `read` or `mapfile` set from what is given. False if nothing is left of it."""
        script, variables = self.script, self.script.variables
        takes_all = words[0] != "read" or "-d" in words or any(word.endswith("d") for word in words if word[:1] == "-")
        given = script.given
        text = None if given is None or words[0] == "getopts" else given.all() if takes_all else given.line()
        if text is None:
            for word in filter(is_name, words[1:]):
                variables.doubt(word, appends=False)
            return None
        names = [name for name in words[1:] if is_name(name)]
        for name, value in values_read(words, text.removesuffix("\n"), variables.separators).items():
            if value is None or variables.kept & {*names}:  # which ends where a final value would be another
                variables.doubt(name, appends=False)
            else:
                variables.put(name, value)
        return text.endswith("\n") if words[0] == "read" and not takes_all else True

    def printed_by(self, words: list[str]) -> tuple[str | None, bool | None]:
        """Text that a command prints, and True if it succeeds; None for what is unknown."""
        if words[0] in ("cat", "grep", "sed", "head", "tail", "cut", "awk") and len(words) > 1:
            *before, path = words
            content = self.script.text_of_file(path)
            if content is not None:
                return printed_by(before, Given(content))
        if words[0] == "tee" and self.script.given is not None:
            text = self.script.given.all() or ""
            for word in (word for word in words[1:] if not word.startswith("-")):
                self.script.write(word, text, appends="-a" in words)
            return text, True
        if self.script.printed is None and words[0] in PRINTING:
            return None, None
        return printed_by(words, self.script.given)
