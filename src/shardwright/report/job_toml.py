"""A job as a TOML file that every command on a job reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.toml_text import value_text
from shardwright.report.output import write_output


def write_toml(path: Path, job: JobSpec) -> None:
    """The job as a TOML file, which every command on a job reads: fields that are not the default."""
    fields = job.model_dump(exclude_defaults=True)
    lines: list[str] = ["# A job that shardwright wrote", f"name = {value_text(fields.pop('name', job.name))}"]
    for section, values in fields.items():
        lines += ["", *_section(section, values)]
    write_output(path, "\n".join(lines) + "\n", "--toml")


def _section(name: str, values: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    yield f"[{name}]"
    yield from (f"{key} = {value_text(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            yield ""
            yield from _section(f"{name}.{key}", value)
