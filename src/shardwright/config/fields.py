"""Every field of a job with its default and meaning, for help texts, so that no text is written twice."""

from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from shardwright.config.base import Spec
from shardwright.config.job import JobSpec
from shardwright.config.registry import NameOf


def job_fields() -> dict[str, list[tuple[str, str]]]:
    """Fields of a job by section, as ("field = default", meaning). The first section, "", has the fields outside all
    sections."""
    sections: dict[str, list[tuple[str, str]]] = {"": []}
    _list_fields("", JobSpec, sections)
    return sections


def _list_fields(section: str, spec: type[Spec], sections: dict[str, list[tuple[str, str]]]) -> None:
    """Add the fields of one section, and of the sections within it, to `sections`."""
    for name, field in spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Spec):
            inner = f"{section}.{name}" if section else name
            sections[inner] = []
            _list_fields(inner, field.annotation, sections)
        else:
            sections[section].append(_row(name, field))


def _row(name: str, field: FieldInfo) -> tuple[str, str]:
    meaning = field.description or ""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if mark := next((mark for mark in field.metadata if isinstance(mark, NameOf)), None):
        choices = mark.names
        effects = [f"{facts.name}: {facts.does}" for facts in mark.descriptions if getattr(facts, "does", "")]
        meaning += f" {'; '.join(effects)}." if effects else ""
    if len(choices) > 1:
        meaning += " One of " + ", ".join(map(str, choices)) + "."
    return f"{name} = {_shown(field.get_default(call_default_factory=True))}", meaning


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
