"""The command line of torchtitan 0.3: the configuration function, and the flags that override its result."""

from dataclasses import dataclass, field
from typing import Any

from shardwright.interchange.systems.torchtitan_table import PARTS

_WORDS = {"True": True, "False": False, "None": None}
_POLICY = "activation_checkpoint"


@dataclass
class CommandLine:
    """The module and the name of the configuration function, and settings under the release's names."""

    module: str = ""
    config: str = ""
    given: dict[str, Any] = field(default_factory=dict)


def command_line(words: list[str]) -> CommandLine:
    """Parse the words behind torchtitan.train."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [value] if equals else []
        elif word.replace("-", "_").startswith(f"{_POLICY}:"):  # the class of a field that has several possible classes
            flags[_POLICY], name = [word.partition(":")[2]], ""
        elif name:
            flags[name].append(word)
    line = CommandLine(" ".join(flags.pop("module", [])), " ".join(flags.pop("config", [])))
    for name, values in flags.items():
        _put(name, values, line.given)
    return line


def _put(name: str, values: list[str], given: dict[str, Any]) -> None:
    section, _, key = name.rpartition(".")
    if not values and key.startswith("no_"):
        given[f"{section}.{key[3:]}"] = False
    elif name == PARTS:
        given[name] = [value.split(",") for value in values]
    elif name.endswith(".betas") and len(values) == 2:
        given |= {f"{name}.{place}": value for place, value in enumerate(values)}
    elif len(values) == 1:
        given[name] = _WORDS.get(values[0], values[0])
    else:
        given[name] = values or True
