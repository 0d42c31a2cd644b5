"""Files that a script names for another of its training commands, or in whose place it writes others."""

import re
from collections.abc import Iterable, Mapping, Set
from pathlib import PurePath

from shardwright.config.phrase import say
from shardwright.interchange.launcher import Launched
from shardwright.interchange.reading.configuration_keys import ENGINE_KEYS, OPTION_KEYS, line_beginning
from shardwright.interchange.reading.file_signs import is_configuration
from shardwright.interchange.reading.shell_words import ShellFault

# Configurations of one kind, of which a command has one.
_KINDS = tuple(
    re.compile(rf"{line_beginning(*keys)}[\"']?[ \t]*:", re.MULTILINE) for keys in (*ENGINE_KEYS, OPTION_KEYS)
)


def left_out(texts: Mapping[str, str], command: Launched, rivals: Set[str]) -> list[str]:
    """The files that neither the command that is read names nor a configuration of its own: of those that earlier
    training commands name, and of `rivals`, the paths of files that nobody named to us and that may be of another."""
    suspects = {name for name in texts if PurePath(name).name in command.of_others or name in rivals}
    left = [texts[name] for name in suspects if PurePath(name).name not in command.named]
    suspects |= {name for name in texts if any(_names(text, name) for text in left)}  # which these name
    suspects = {name for name in suspects if PurePath(name).name not in command.named}
    kept = [*command.written.values()]
    kept += [text for name, text in texts.items() if name not in suspects and is_configuration(name)]
    while further := [name for name in suspects if any(_names(text, name) for text in kept)]:
        kept = [texts[name] for name in further]
        suspects -= {*further}
    return [name for name in texts if name in suspects | _doubled(texts, suspects, rivals)]


def _names(text: str, path: str) -> bool:
    """True if a text has the name of a file, and not as the end of another one."""
    return bool(re.search(rf"(?<![\w.-]){re.escape(PurePath(path).name)}", text))


def _doubled(texts: Mapping[str, str], suspects: Set[str], rivals: Set[str]) -> set[str]:
    """The rivals beside a file of their kind that is no rival. ShellFault if there are several of one kind, and they
    are rivals alone."""
    kept = [name for name in texts if name not in suspects and is_configuration(name)]
    doubled: set[str] = set()
    for kind in _KINDS:
        of_kind = [name for name in kept if kind.search(texts[name])]
        of_rivals = [name for name in of_kind if name in rivals]
        if len(of_kind) < 2 or not of_rivals:
            continue
        if len(of_rivals) == len(of_kind):
            files = tuple(PurePath(name).name for name in of_rivals)
            raise ShellFault(
                say("{files} are of one kind, and the command names each; name the one that counts too", files=files)
            )
        doubled |= {*of_rivals}
    return doubled


def left_out_note(name: str) -> str:
    """The note on a configuration that another training command of the script names."""
    return say("{file} is left out: the training command that is read does not name it", file=PurePath(name).name)


def overwritten_names(names: Iterable[str], written: Mapping[str, str]) -> list[str]:
    """The files in whose place a script writes others of the same name, and reads those."""
    return sorted(name for name in names if PurePath(name).name in {PurePath(path).name for path in written})


def overwritten_note(name: str) -> str:
    """The note on a file that a script writes itself."""
    return say("{file}: what the script writes there counts, and not the file", file=name)
