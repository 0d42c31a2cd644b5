"""Signs by which a file is known as one of a training system: its keys, the commands that it starts, what it imports.

Each system has the signs of its files in a file of its own, beside what reads them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.config.dotted_keys import flat_keys

# Who has a sign. A file with signs of several systems is of the one with the highest.
OWN, SHARED, GENERAL = 2, 1, 0  # one system alone; also programs under that system; many programs
CONFIGURATIONS = (".json", ".yaml", ".yml")
COMMENT = re.compile(r"^[ \t]*#(?!!|SBATCH|PBS|BSUB).*$", re.MULTILINE)


def is_configuration(name: str) -> bool:
    """True for the name of a file that may be a configuration, by its ending."""
    return name.lower().endswith(CONFIGURATIONS)


@dataclass(frozen=True)
class FileSigns:
    """Signs of one system. A configuration has all names of one of `keys` and none of `lacks`; names of sections count,
    too. `commands` are patterns of launch scripts, `imports` of Python files."""

    keys: tuple[tuple[str, ...], ...] = ()
    lacks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    weight: int = OWN
    suffixes: tuple[str, ...] = CONFIGURATIONS  # of files with such keys

    def fit_keys(self, data: Mapping[str, Any], suffix: str = ".yaml") -> bool:
        """True if a configuration with a suffix has the keys."""
        names = names_in(data)
        return suffix in self.suffixes and not names & {*self.lacks} and any(names >= {*keys} for keys in self.keys)

    def fit_script(self, text: str) -> bool:
        """True if a launch script starts one of the commands, outside comments."""
        plain = COMMENT.sub("", text)
        return any(re.search(pattern, plain, re.MULTILINE) for pattern in self.commands)

    def fit_words(self, words: Sequence[str]) -> bool:
        """True if the words of a command are one of the commands."""
        return any(re.search(pattern, " ".join(words)) for pattern in self.commands)

    def fit_python(self, text: str) -> bool:
        """True if a Python file imports one of the packages."""
        return any(re.search(pattern, text, re.MULTILINE) for pattern in self.imports)


def names_in(data: Mapping[str, Any]) -> set[str]:
    """The names of all keys of a configuration, such as "model.layers", and of its upper two levels of sections."""
    keys = flat_keys({str(key): value for key, value in data.items()})
    return {*map(str, data), *keys} | {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2)}
