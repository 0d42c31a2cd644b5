"""torchtitan's TOML, which its releases up to 0.2 read (2024 to early 2026)."""

from collections.abc import Mapping
from typing import Any

from shardwright.config.dotted_keys import flat_keys, nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.toml_text import value_text
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.systems.torchtitan_releases import IN_TOML, read_settings

SIGNS = (FileSigns((("parallelism",), ("training",), ("activation_checkpoint",), ("job",)), suffixes=(".toml",)),)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a TOML file. Raises ShellFault."""
    flat: dict[str, Any] = {}
    for name, text in texts.items():
        flat |= flat_keys(read_data(name, text))
    return read_settings(Settings(flat, overrides=asked.fields), IN_TOML, asked)


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings under torchtitan's keys."""
    return IN_TOML.settings(job)


def write(job: JobSpec) -> dict[str, str]:
    """The configuration of a job, by its file name."""
    lines = [
        f"# {' '.join(job.name.split())}, for torchtitan up to 0.2, written by shardwright.",
        f"# It takes {job.plan.world} GPUs.",
    ]
    for section, values in nested_keys(settings_of(job)).items():
        lines += ["", *_section(section, values)]
    return {"job.toml": "\n".join(lines) + "\n"}


def _section(name: str, values: dict[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"[{name}]", *(f"{key} = {value_text(value)}" for key, value in plain.items())] if plain else []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [*([""] if lines else []), *_section(f"{name}.{key}", value)]
    return lines
