"""The effects of a script's commands on its variables, files and batch options, as far as they are known."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardwright.config.base import shortened
from shardwright.config.other_systems.shell_skipped import DECLARING, READING, assigned
from shardwright.config.other_systems.shell_values import is_true, readable, unknown_names
from shardwright.config.other_systems.shell_words import Token, WordPiece

if TYPE_CHECKING:
    from shardwright.config.other_systems.shell_script import Script

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
_CHANGED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*(?:\+\+|--|(?:[-+*/%]|<<|>>)?=(?!=))")


@dataclass(frozen=True)
class Command:
    """A command that the script would run, with its words expanded."""

    line: int
    words: list[str]


class CommandEffects:
    """The commands of one text, `deep` levels within others. It `ended` where it exits."""

    def __init__(self, script: "Script", deep: int) -> None:
        self.script, self.deep, self.ended = script, deep, False

    def act(self, line: int, tokens: list[Token], redirected: dict[str, Token]) -> bool | None:
        """The effect of a command with its assignments and redirections. Whether it succeeds; None is not known."""
        variables, script = self.script.variables, self.script
        rest = [token for token in tokens if token.pieces]
        if len(rest) == 1 and [piece.kind for piece in rest[0].pieces] == ["arithmetic"]:
            return self._counted(rest[0].pieces[0].text)
        if rest and rest[0].plain in DECLARING:
            rest = [token for token in rest[1:] if assigned(token)]
            while rest:
                rest = self._assign(rest)
            return True
        while rest and assigned(rest[0]):
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

    def _counted(self, text: str) -> bool | None:
        """The value of (( ... )); assignments in it are not followed."""
        variables = self.script.variables
        if changed := _CHANGED.findall(text):
            for name in changed:
                variables.doubt(name, appends=False)
            return None
        value = variables.arithmetic(text)
        return None if unknown_names(value) else value != "0"

    def _assign(self, tokens: list[Token]) -> list[Token]:
        name, appends = assigned(tokens[0]) or ("", False)
        first = tokens[0].pieces[0]
        pieces = (WordPiece("text", first.text[first.text.index("=") + 1 :], False), *tokens[0].pieces[1:])
        value = self.script.variables.text_of(Token(tokens[0].line, pieces=pieces))
        self.script.variables.put(name, self.script.variables.named(name, value), appends)
        return tokens[1:]

    def _document(self, words: list[str], text: str, redirected: dict[str, Token]) -> bool:
        target = redirected.get(">") or redirected.get(">>")
        if target is not None:
            self.script.written[self.script.variables.text_of(target)] = text
        elif words and PurePath(words[0]).name in ("sbatch", "bash", "sh", "srun"):
            self.script.batch_options([part for word in words for part in word.split("=", 1)])
            self.script.follow(text, self.deep + 1)
        return True

    def _command(self, line: int, words: list[str], script: "Script") -> bool | None:
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
        if name in READING:
            for word in words[1:]:
                if word.isascii() and word.isidentifier():
                    script.variables.doubt(word, appends=False)
            return None
        if name in script.functions:
            script.doubt(script.functions[name])
            return None
        if name in ("sbatch", "srun", "salloc"):
            script.batch_options([part for word in words for part in word.split("=", 1)])
        sourced = name in ("source", ".")
        other = next((word for word in words[1:] if PurePath(word).name in script.files), None)
        if other and (sourced or name in ("sbatch", "bash", "sh", "srun")):
            script.follow(script.files[PurePath(other).name], self.deep + 1, words[-1] != other)
        elif sourced:
            script.notes.append(
                f"line {line}: {shortened(readable(' '.join(words[:2])))} is not read: name that file too"
            )
        else:
            return self._started(line, words, script)
        return True

    def _started(self, line: int, words: list[str], script: "Script") -> bool | None:
        """A command, of which nobody knows how it ends, or the script within one of its words."""
        if words[0] == "eval":
            script.follow(" ".join(words[1:]), self.deep + 1)
            return True
        for before, word in zip(["", *words], words, strict=False):
            is_script = before == "-c" or (" --" in word and ".py" in word)
            if is_script and any(blank in word for blank in " \n"):
                script.follow(word, self.deep + 1)
                return True
        script.commands.append(Command(line, words))
        return None
