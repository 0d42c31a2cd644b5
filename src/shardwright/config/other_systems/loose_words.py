"""Words of a training command that are not known and that could be further options: what nobody set, what a function
or a command gives. One that is the value of a setting is asked for where the setting matters; any other is a fault."""

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwright.config.other_systems.known_settings import known_setting, subject_of
from shardwright.config.other_systems.settings import Settings
from shardwright.config.other_systems.shell_values import UNKNOWN, unknown_names


@dataclass(frozen=True)
class LooseWord:
    """A word that is not known. `behind` is the option before it, with `place` values between; empty is none.
    `is_of_script` is one that the script itself makes."""

    behind: str
    place: int
    names: tuple[str, ...]
    is_of_script: bool


def loose_words(words: Sequence[str], is_made: Callable[[str], bool]) -> tuple[LooseWord, ...]:
    """Words of a command's arguments that are not known. `is_made` says what the script itself makes."""
    loose, behind, place = [], "", 0
    for word in words:
        names = tuple(unknown_names(word))
        if word.startswith("--") and not UNKNOWN.search(word.partition("=")[0]):
            behind, equals, _ = word[2:].partition("=")
            behind, place = behind.partition(" ")[0].replace("_", "-"), int(bool(equals))
            continue
        if names and not UNKNOWN.sub("", word).strip("- "):
            loose.append(LooseWord(behind, place, names, any(map(is_made, names))))
        place += 1
    return tuple(loose)


def loose_faults(words: Sequence[LooseWord], settings: Settings, *systems: str) -> list[str]:
    """One fault for all that could be options. The settings have been read."""
    asked = {_bare(name) for name in settings.needed}
    read = {_bare(name) for name in settings.asked}
    where: dict[str, str] = {}
    for word in words:
        if word.behind not in asked and not _is_value(word, read, systems):
            where |= dict.fromkeys(word.names, f"behind --{word.behind}" if word.behind else "first")
    if not where:
        return []
    told = ", ".join(f"${name} {place}" for name, place in where.items())
    ways = " ".join(f"--set {shlex.quote(name)}=WORDS" for name in where)
    return [f"words of the training command are not followed here ({told}); say what they are, or nothing: {ways}"]


def _bare(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")


def _is_value(word: LooseWord, read: Collection[str], systems: Sequence[str]) -> bool:
    """True if a word belongs to the option before it."""
    if not word.behind or any(known_setting("takes_nothing", system, word.behind) for system in systems):
        return False
    if any(known_setting("takes_several", system, word.behind) for system in systems):
        return word.place == 0 or not word.is_of_script
    names = (word.behind, f"--{word.behind.replace('-', '_')}")
    is_known = word.behind in read or any(subject_of(system, name) for system in systems for name in names)
    return word.place == 0 and is_known
