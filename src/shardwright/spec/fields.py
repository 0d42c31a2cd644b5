"""Every field of a job with its default and meaning, for help texts: written nowhere twice."""

from shardwright.spec.base import Spec
from shardwright.spec.job import JobSpec


def job_fields() -> dict[str, list[tuple[str, str]]]:
    """By section: (field = default, meaning)."""
    sections = {}
    for section, field in JobSpec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Spec):
            sections[section] = [
                (f"{name} = {_shown(inner.get_default(call_default_factory=True))}", inner.description or "")
                for name, inner in field.annotation.model_fields.items()
            ]
    return sections


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Spec):
        return "{ " + ", ".join(f"{name} = {_shown(inner)}" for name, inner in value) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)
