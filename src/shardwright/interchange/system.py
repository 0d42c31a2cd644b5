"""The systems whose jobs are read and written. Each brings its facts in its own file under `systems/`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.registry import Registry
from shardwright.config.software import software_of
from shardwright.config.software_support import had_by
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.unread_systems import UNREAD_SYSTEMS, UnreadSystem


@dataclass(frozen=True, kw_only=True)
class SourceSystem:
    """One system whose files are read."""

    name: str  # that commands take
    place: int  # in lists of systems, ascending
    title: str
    prefix: str = ""  # before the names of settings in messages
    read: Callable[[Mapping[str, str], Asked], ReadResult]
    others: Mapping[str, str] = field(default_factory=dict)  # suffix of a file -> system of another release
    variables: tuple[str, ...] = ()  # that its reader takes, beside those of the files
    library: tuple[str, ...] = ()  # folders above the first file, with files it begins from
    # ends of the paths of Python files that its files name as modules
    modules: Callable[[Mapping[str, str], Asked], list[str]] | None = None
    signs: tuple[FileSigns, ...]  # by which its files are known
    takes: tuple[str, ...] | None = None  # systems of its files; None if any are
    leaves_out: bool = False  # files that the training command does not name, of those that were found
    has_templates: bool = False  # scripts make its engine's configuration of files beside them
    is_behind_scripts: bool = False  # its programs have no name or option of their own: a configuration tells them


@dataclass(frozen=True)
class RunFiles:
    """The files by which a job is run for good, and not looked at: with its own data, and with checkpoints.

    `write` takes the job, the folder from which its paths are, and the seconds of a step (0 if unknown). It raises
    PlanError. `program` is the file of the system's own code that run.sh starts.
    """

    program: str
    write: Callable[[JobSpec, Path, float], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class System(SourceSystem):
    """One system whose files are read and written: a function that writes files, and `settings`, which returns a job's
    settings under the names of the system."""

    write: Callable[[JobSpec], dict[str, str]]
    settings: Callable[[JobSpec], dict[str, Any]]
    software: str  # the generation of software as which its plans are priced
    run_files: RunFiles | None = None  # None if `launch` does not start its jobs
    written: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # field of the plan -> values that `write` can say, where its software has others, too

    def has(self, software: str) -> dict[str, tuple[Any, ...]]:
        """The values that a search may take, by field of the plan: what a generation of software has, and what this
        system has and `write` can say. Writing a plan finds limits that no list tells."""
        values = dict(self.written)
        for generation in (self.software, software):
            for name, had in had_by(software_of(generation)).items():
                values[name] = tuple(value for value in values.get(name, had) if value in had)
        return values


_PACKAGE = "shardwright.interchange.systems"
SOURCES = Registry("a system", _PACKAGE, SourceSystem)
SYSTEMS = Registry("a system", _PACKAGE, System)  # those of them that are written, too


def names_with_run_files() -> list[str]:
    """The systems whose jobs `launch` starts: it writes their data and checkpoints, too."""
    return [system.name for system in SYSTEMS.values() if system.run_files is not None]


def systems_by_signs() -> list[tuple[SourceSystem, FileSigns]]:
    """All systems with their signs, first those that no other system has."""
    pairs = [(system, signs) for system in SOURCES.values() for signs in system.signs]
    return sorted(pairs, key=lambda pair: -pair[1].weight)


def system_of_keys(data: Mapping[str, Any], suffix: str) -> SourceSystem | UnreadSystem | None:
    """The system whose configurations have such keys in files with a suffix; None if none is known."""
    unread = next((system for system in UNREAD_SYSTEMS if system.signs.fit_keys(data, suffix)), None)
    return unread or next((system for system, signs in systems_by_signs() if signs.fit_keys(data, suffix)), None)


def system_of(name: str, files: Iterable[str]) -> SourceSystem:
    """The system of a name, in the release that the suffix of the files belongs to."""
    system = SOURCES[name]
    suffixes = {PurePath(file).suffix.lower() for file in files}
    return SYSTEMS[system.others[suffixes.pop()]] if len(suffixes) == 1 and suffixes <= system.others.keys() else system
