"""Unknown words of a training command that could be further options: variables that nobody set, and the output of
functions or commands. A word that is the value of a setting is asked for if the setting has an effect; any other word
is a fault."""

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwright.config.phrase import say
from shardwright.interchange.known_settings import known_setting, subject_of
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names


@dataclass(frozen=True)
class LooseWord:
    """An unknown word. `option` is the last option before it (empty if none), with `place` values between the two.
    `names` are the unknown variables in the word. `is_of_script` is True if the script itself makes the word."""

    option: str
    place: int
    names: tuple[str, ...]
    is_of_script: bool


def loose_words(words: Sequence[str], is_made: Callable[[str], bool]) -> tuple[LooseWord, ...]:
    """The unknown words among a command's arguments. `is_made` tells if the script itself makes a variable."""
    unknown_words, option, num_values = [], "", 0
    for word in words:
        names = tuple(unknown_names(word))
        if word.startswith("--") and not UNKNOWN.search(word.partition("=")[0]):
            option, equals, _ = word[2:].partition("=")
            option, num_values = option.partition(" ")[0].replace("_", "-"), int(bool(equals))
            continue
        if names and not UNKNOWN.sub("", word).strip("- "):
            unknown_words.append(LooseWord(option, num_values, names, any(map(is_made, names))))
        num_values += 1
    return tuple(unknown_words)


_GROUPS = ("_ARGS", "_OPTIONS", "_FLAGS", "_OPTS")  # endings of names of variables that hold options by subject
_LEAST_OF_A_GROUP = 2


def without_unset_groups(
    words: Sequence[str], variables: Collection[str], commented: Collection[str]
) -> tuple[list[str], list[str]]:
    """The words of a command without variables that nobody sets and that a shell finds empty, and a note on each: those
    among several of their kind that the script sets, such as $MOE_ARGS beside GPT_ARGS and DATA_ARGS, and those that
    comments would set. `variables` are the names of those that are set, `commented` of those in comments."""
    kept, notes = list[str](), dict[str, str]()
    for word in words:
        names = unknown_names(word) if not UNKNOWN.sub("", word) else []
        reasons = {name: _reason_for_empty(name, variables, commented) for name in names}
        if reasons and all(reasons.values()):
            notes |= reasons
        else:
            kept.append(word)
    return kept, [*notes.values()]


def _reason_for_empty(name: str, variables: Collection[str], commented: Collection[str]) -> str:
    """A note that a variable which nobody sets is empty; none if that is not known."""
    others = _of_the_kind_of(name, variables)
    if len(others) >= _LEAST_OF_A_GROUP:
        return say(
            "${name} is empty, for no line sets it as others do {others} (--set {name}=WORDS)",
            name=name,
            others=others[:3],
        )
    if name in commented and name not in variables:
        return say("${name} is empty, for comments alone set it (--set {name}=WORDS)", name=name)
    return ""


def _of_the_kind_of(name: str, variables: Collection[str]) -> tuple[str, ...]:
    """The variables that end as one does which nobody sets and that holds options by its name."""
    ending = next((ending for ending in _GROUPS if name.endswith(ending)), "")
    return tuple(sorted(v for v in variables if v.endswith(ending))) if ending and name not in variables else ()


def loose_faults(words: Sequence[LooseWord], settings: Settings, *systems: str) -> list[str]:
    """A list with one fault for all words that could be options, or none. Call it after the settings are read."""
    needed = {_bare(name) for name in settings.needed}
    read = {_bare(settings.spelled.get(name, name)) for name in settings.names_read}
    places: dict[str, str] = {}
    for word in words:
        if word.option not in needed and not _is_value(word, read, systems):
            position = say("behind {option}", option=f"--{word.option}") if word.option else say("first")
            places |= dict.fromkeys(word.names, position)
    if not places:
        return []
    return [
        say(
            "words of the training command are not followed here ({words}); say what they are, or nothing: {ways}",
            words=tuple(say("${name} {position}", name=name, position=place) for name, place in places.items()),
            ways=" ".join(f"--set {shlex.quote(name)}=WORDS" for name in places),
        )
    ]


def _bare(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")


def _is_value(word: LooseWord, read: Collection[str], systems: Sequence[str]) -> bool:
    """True if a word is a value of the option before it."""
    if not word.option or any(known_setting("takes_nothing", system, word.option) for system in systems):
        return False
    if any(known_setting("takes_several", system, word.option) for system in systems):
        return word.place == 0 or not word.is_of_script
    names = (word.option, f"--{word.option.replace('-', '_')}")
    is_known = word.option in read or any(subject_of(system, name) for system in systems for name in names)
    return word.place == 0 and is_known
