"""A job as a TOML file that every command on a job reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.config import catalog
from shardwright.config.job import JobSpec
from shardwright.config.toml_text import value_text
from shardwright.report.output import write_output


def write_toml(path: Path, job: JobSpec) -> None:
    """The job as a TOML file, which every command on a job reads."""
    write_output(path, job_toml(job), "--toml")


def job_toml(job: JobSpec) -> str:
    """The job as TOML: fields that are not the default, and all that a name of the catalog stands for."""
    fields = job.model_dump(exclude_defaults=True)
    _keep_named(fields, job)
    lines: list[str] = ["# A job that shardwright wrote", f"name = {value_text(fields.pop('name', job.name))}"]
    for section, values in fields.items():
        lines += ["", *_section(section, values)]
    return "\n".join(lines) + "\n"


def _keep_named(fields: dict[str, Any], job: JobSpec) -> None:
    """Add the fields that an entry of the catalog has, also where the job sets one of them back to the default."""
    whole = job.model_dump()
    kinds: dict[str, catalog.Kind] = {"model": "models", "cluster": "clusters"}
    for section, kind in kinds.items():
        name = whole[section]["name"]
        if name in catalog.names(kind):
            kept = _overlaid(catalog.read(kind, name), whole[section], fields.get(section, {}))
            fields[section] = {"name": name} | kept


def _overlaid(entry: dict[str, Any], whole: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The fields that are kept, and those of an entry as the job has them."""
    overlaid = dict(kept)
    for key, value in entry.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            overlaid[key] = _overlaid(value, whole[key], kept.get(key, {}))
        elif key in whole:
            overlaid[key] = whole[key]
    return overlaid


def _section(name: str, values: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    yield f"[{name}]"
    yield from (f"{key} = {value_text(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            yield ""
            yield from _section(f"{name}.{key}", value)
