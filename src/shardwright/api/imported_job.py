"""A job of another training system, read from its files as commands and an agent name them."""

from collections.abc import Sequence
from pathlib import Path

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, error_text
from shardwright.config.catalog import written_alike
from shardwright.config.phrase import any_of, say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text, system_reason
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.named_scripts import script_texts
from shardwright.interchange.recognised import DATA, JOB, SCRIPTS, system_name_of
from shardwright.interchange.system import SOURCES


def system_and_files(words: tuple[str, ...], chosen: str = "") -> tuple[str, tuple[str, ...]]:
    """The system that --from or the first word names, else that of the first file; and the files. Raises PlanError."""
    first, *others = words
    is_system = first in SOURCES and bool(others) and not Path(first).exists()
    if chosen and is_system and first != chosen:
        fault = say(
            "two systems are named, {first} before the files and {named} by --from; name one of them",
            first=first,
            named=chosen,
        )
        raise PlanError(first, [fault])
    if chosen:
        return chosen, tuple(others) if is_system else words
    if first in SOURCES and others:
        return first, tuple(others)
    kind = say("launch script or configuration")
    scripts = [word for word in others if word.endswith(SCRIPTS) and Path(word).is_file()]
    configurations = [word for word in others if word.endswith((*DATA, ".py")) and Path(word).is_file()]
    try:
        read = {word: read_text(Path(word), MIB, kind) for word in (first, *scripts)}
        texts = [*read.values(), *script_texts(Path(first), read).values()]
        data = {word: read_text(Path(word), MIB, kind) for word in configurations}
        system = system_name_of(first, *texts, configurations=data)
    except (FileFault, OSError) as error:
        raise PlanError(first, [_unread_fault(first, others, error)]) from None
    if system == JOB:
        raise PlanError(first, [say("it is a job of shardwright, or a model; name it to plan, estimate or train")])
    return system, words


def _unread_fault(first: str, others: Sequence[str], error: FileFault | OSError) -> str:
    """The fault of a first word that can't be read as a file: a system without files, a slip of one, or another."""
    if first in SOURCES:
        return say("it is a system, and none of its files is named; write {words} FILE", words=f"import {first}")
    near = written_alike(first.lower(), list(SOURCES.names))
    if isinstance(error, FileNotFoundError) and near and others:
        return say("it is neither a system nor a file; did you mean {meant}?", meant=any_of(near))
    return say(
        "it can't be read as a file ({reason}); name a file, or one of {systems} and its files",
        reason=system_reason(error) if isinstance(error, OSError) else error_text(error),
        systems=SOURCES.names,
    )


def imported_job(
    name: str,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    cluster: AskedCluster,
    arguments: tuple[str, ...] = (),
) -> Imported:
    """The job of files of a system, with what was assumed and what it lacks. `sets` are fields of the job and variables
    of scripts, `arguments` those of the first script. Raises PlanError."""
    variables, overrides = split_sets(sets)
    return read_job_of(SOURCES[name], files, Asked(variables, overrides, cluster, arguments))
