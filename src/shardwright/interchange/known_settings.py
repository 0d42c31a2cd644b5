"""Known settings of other systems that have no effect on a plan (known.toml)."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def _known() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "known.toml").read_text(encoding="utf-8"))


@cache
def _beginnings(system: str) -> tuple[tuple[str, str], ...]:
    """Pairs of the beginning of a name and its subject, the longest beginning first."""
    pairs = [(beginning, subject) for subject, names in _known()[system].items() for beginning in names]
    return tuple(sorted(pairs, key=lambda pair: -len(pair[0])))


def subject_of(system: str, name: str) -> str:
    """The subject of a setting that has no effect on the plan; empty if it is unknown."""
    return next((subject for beginning, subject in _beginnings(system) if name.startswith(beginning)), "")


def is_uncounted(subject: str) -> bool:
    """True if settings on a subject have an effect that the cost model does not count."""
    return subject in _known()["uncounted"]["subjects"]


def is_usual(name: str, value: Any) -> bool:
    """True if a setting on an uncounted subject has the value that the cost model assumes."""
    return str(value) in _known()["usual"].get(name, ())


def subjects(names: Any, *systems: str) -> dict[str, str]:
    """Subjects, by name, of the settings that have no effect on the plan in one of the systems."""
    by_name = {name: next(filter(None, (subject_of(system, name) for system in systems)), "") for name in names}
    return {name: subject for name, subject in by_name.items() if subject}


def known_setting(list_name: str, system: str, name: str) -> bool:
    """True if a list of known.toml ("takes_nothing", "takes_several") has a setting of a system."""
    return name.startswith(tuple(_known()[list_name].get(system, ())))


def program(system: str) -> str:
    """The program that launchers of a system start."""
    return str(_known()["programs"][system])
