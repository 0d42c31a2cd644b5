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
    """Beginnings of names with what they are about, the longest first."""
    pairs = [(beginning, subject) for subject, names in _known()[system].items() for beginning in names]
    return tuple(sorted(pairs, key=lambda pair: -len(pair[0])))


def subject_of(system: str, name: str) -> str:
    """The subject of a setting that has no effect on the plan; empty if it is unknown."""
    return next((subject for beginning, subject in _beginnings(system) if name.startswith(beginning)), "")


def is_uncounted(subject: str) -> bool:
    """True if settings on a subject change something that counts, and that is not counted here."""
    return subject in _known()["uncounted"]["subjects"]


def is_usual(name: str, value: Any) -> bool:
    """True if a setting that could change something that is not counted has the value that is counted with."""
    return str(value) in _known()["usual"].get(name, ())


def subjects(names: Any, *systems: str) -> dict[str, str]:
    """Names that say nothing of the plan in one of the systems, with what they are about."""
    by_name = {name: next(filter(None, (subject_of(system, name) for system in systems)), "") for name in names}
    return {name: subject for name, subject in by_name.items() if subject}


def known_setting(list_name: str, system: str, name: str) -> bool:
    """True if a setting is in a list of a system that is there for another reason than its subject."""
    return name.startswith(tuple(_known()[list_name].get(system, ())))


def program(system: str) -> str:
    """The program that launchers start."""
    return str(_known()["programs"][system])
