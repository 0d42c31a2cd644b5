"""Ways out of words that a command does not take: options that are fields of a job, and arguments too many."""

import re
import shlex
from collections.abc import Sequence
from itertools import chain

import click

from shardwright.cli.cluster_option_names import CLUSTER_OPTIONS
from shardwright.config.phrase import either, say

_VALUE = "VALUE"  # where none was written
_MOST_MEANT = 2  # fields of names that a word abbreviates
_MOST_LIKE = 0.8  # the likeness of a field's name from which it may be meant


def field_meant(command: click.Command, option: str, value: str, is_alike: bool = False) -> str | None:
    """The way to say an unknown option such as --tp, which is a field of a job; None if it is none, or the command sets
    no fields. A field may be named as Megatron-LM names it, --tensor-model-parallel-size, and by its first letters,
    --lr; with `is_alike` also with a slip."""
    if not _has(command, "--set"):
        return None
    from shardwright.config.field_texts import job_fields

    word = option.lstrip("-").replace("-", "_").lower()
    if len(word) < 2:  # a letter says nothing
        return None
    sections = job_fields()
    paths = [f"{section}.{row.partition(' = ')[0]}" for section, rows in sections.items() if section for row, _ in rows]
    if word in sections:
        return say(
            "No such option '{option}'; {section} is a section of a job's fields, which --set overrides and "
            "shardwright fields {section} lists.",
            option=option,
            section=word,
        )
    meant = _paths_meant(word, paths, is_alike)
    if not meant:
        return None
    return say(
        "No such option '{option}'; it is a field of the job: write {words}.",
        option=option,
        words=either([f"{_option_of(command, path)} {path}={value or _VALUE}" for path in meant]),
    )


def _paths_meant(word: str, paths: Sequence[str], is_alike: bool) -> list[str]:
    """The fields whose own name is a word, those that other software calls so or that it abbreviates; with `is_alike`
    also those whose names are most like it. Fields of nested sections are meant only if no others are."""
    from shardwright.config.catalog import abbreviated, written_alike

    names: dict[str, list[str]] = {}
    for path in sorted(paths, key=lambda path: path.count(".")):
        homes = names.setdefault(path.rpartition(".")[2], [])
        if not homes or path.count(".") == homes[0].count("."):
            homes.append(path)
    if word in names:
        return names[word]
    if path := _field_of_flag(word.replace("_", "-")):
        return [path]
    meant = abbreviated(word, names)[:_MOST_MEANT]
    if not meant and is_alike:
        meant = written_alike(word, list(names), 1, _MOST_LIKE)
    return list(chain.from_iterable(names[name] for name in meant))


def _field_of_flag(flag: str) -> str:
    """The field that a flag of Megatron-LM sets; empty if none is known by a single row."""
    from shardwright.interchange.rows import SettingRow
    from shardwright.interchange.systems.megatron import PLAN, SHAPE, TRAINING

    rows = (row for row in (*SHAPE, *PLAN, *TRAINING) if isinstance(row, SettingRow))
    return next((row.job_field for row in rows if row.names[0] == flag), "")


def _option_of(command: click.Command, field: str) -> str:
    """The option by which a command is told a field: a search keeps one of the plan, where others override it."""
    return "--keep" if field.startswith("plan.") and _has(command, "--keep") else "--set"


def _has(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


def too_many_words(command: click.Command, words: Sequence[str], extra: Sequence[str]) -> str | None:
    """The ways to say arguments that a command does not take, of all its words: as options, or as the name of a model;
    None if none is known."""
    if _has(command, "--prompt") and not any(word == "--prompt" for word in words):
        return say("did you mean {ways}?", ways=f"--prompt {shlex.quote(' '.join(extra))}")
    if any(word.partition("=")[0] == "--from" for word in words) and _has(command, "--with"):
        files = " ".join(f"--with {word}" for word in extra)
        return say("further files of --from stand behind --with: {ways}", ways=files)
    ways = [way for way in (_way_of(command, word) for word in extra) if way]
    if ways:
        return say("did you mean {ways}?", ways=" ".join(ways))
    if all(parameter.name != "job" for parameter in command.params):
        return None
    from shardwright.config import catalog

    first = next((place for place, word in enumerate(words) if word == extra[0]), 0)
    name = " ".join((*words[max(0, first - 1) : first], *extra))
    if near := catalog.nearest(name.lower().replace(" ", "-"), catalog.names("models")):
        return say("a name is one word; did you mean {ways}?", ways=either(list(near)))
    return None


def _way_of(command: click.Command, word: str) -> str:
    """An option with a word that it takes; empty if none is known."""
    if re.fullmatch(r"\w+(\.\w+)+=.*", word) and _has(command, "--set"):
        return f"{_option_of(command, word)} {word}"
    if _has(command, "--on") and re.fullmatch(r"[\w.-]+:\w+(@[\w.]+)?", word):
        return f"--on {word}"
    if word.isdecimal() and _has(command, CLUSTER_OPTIONS["devices"][0]):
        return f"{CLUSTER_OPTIONS['devices'][0]} {word}"
    if _has(command, CLUSTER_OPTIONS["device"][0]) and _is_device(word):
        return f"{CLUSTER_OPTIONS['device'][0]} {word}"
    return ""


def _is_device(word: str) -> bool:
    from shardwright.config.device_name import device_name

    try:
        device_name(word)
    except KeyError:
        return False
    return True
