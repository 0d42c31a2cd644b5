"""Command lines of programs that Hydra configures: a script with words such as model.layers=4, ++trainer.devices=8."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import signed
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked
from shardwright.interchange.launcher import find_training_command
from shardwright.interchange.reading.shell_marks import readable
from shardwright.interchange.reading.shell_words import ShellFault

_YAML = (".yaml", ".yml")
_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<name>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None, "": None}
_OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


def is_training(words: list[str]) -> bool:
    """True if a command starts a program with Hydra's words or options."""
    has_program = any(word.endswith(".py") for word in words)
    return has_program and any(
        re.match(r"\+{0,2}[A-Za-z_][\w-]*\.[\w.-]+=", word) or word.partition("=")[0] in _OPTIONS for word in words
    )


def with_command_line(texts: Mapping[str, str], asked: Asked) -> tuple[dict[str, str], list[str]]:
    """(the YAML among the texts, the words of the training command of a script among them). Raises ShellFault."""
    scripts = {name: text for name, text in texts.items() if not name.lower().endswith(_YAML)}
    files = {name: text for name, text in texts.items() if name not in scripts}
    if not scripts:
        return files, []
    command = find_training_command(scripts, asked, is_training)
    words = command.arguments
    if not files:
        named = [word for word in words if word.startswith(("--config-name", "-cn"))]
        files_named = [word for word in words if word.lower().endswith(_YAML) and "=" not in word]
        option = [*named, *files_named, ""][0]
        if not option:
            raise ShellFault(
                say(
                    "{program} begins from a YAML of its own, in the folder conf beside it, which is no file here: "
                    "name it",
                    program=shortened(readable(PurePath(command.program).name), 60),
                )
            )
        raise ShellFault(
            say(
                "the script starts a program with a YAML ({option}), which is no file here: name it",
                option=shortened(readable(option), 60),
            )
        )
    return files, [word for word in words if not word.startswith("-")]


def overridden(flat: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The settings with those of a command line in their place. Raises ShellFault for a choice of another group."""
    changed = dict(flat)
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            continue
        name, value = match["name"].partition("@")[0].replace("/", "."), match["value"]
        below = [key for key in changed if key == name or key.startswith(f"{name}.")]
        if match["sign"] == "~" or value is None:
            changed = {key: kept for key, kept in changed.items() if key not in below or match["sign"] != "~"}
            continue
        if below and below != [name] and "." not in name:
            raise ShellFault(
                say(
                    "{word} takes another file for a group of settings; name that file instead",
                    word=shortened(word, 80),
                )
            )
        changed[name] = hydra_value(value)
    return changed


def hydra_value(text: str) -> Any:
    """The value of a word, as Hydra reads it: null, true, a number, a list, or a text."""
    plain = text.strip().strip("'\"")
    if plain.lower() in _CONSTANTS:
        return _CONSTANTS[plain.lower()]
    if plain.startswith("[") and plain.endswith("]"):
        return [hydra_value(item) for item in plain[1:-1].split(",") if item.strip()]
    number = signed(plain)
    if number is not None:
        return number
    return float(plain) if re.fullmatch(r"-?[0-9]*\.?[0-9]+(e[-+]?[0-9]{1,3})?", plain, re.IGNORECASE) else plain
