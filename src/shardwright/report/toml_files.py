"""Files that commands read again, as TOML: a job, and a device that was calibrated."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.config import catalog
from shardwright.config.job import STATED, JobSpec
from shardwright.config.job_file import NAME_FIELDS, PATH_FIELDS
from shardwright.config.phrase import below, in_language, say
from shardwright.config.text_columns import aligned
from shardwright.config.toml_text import JOB_BEGINNING, toml_text, value_text
from shardwright.config.units import seconds_text
from shardwright.config.user_file import path_exists
from shardwright.report.output import replace_output, write_output


def write_toml(path: Path, job: JobSpec, option: str = "--toml") -> None:
    """Write the job as a TOML file, which `option` names. PlanError if it can't be written.

    Relative paths that lead from the working directory to something, and not from the file's folder, become absolute.
    """
    fields, stated = job.model_dump(), _stated(job)
    changed = {section: _with_absolute_paths(fields[section], path.parent) for section in ("model", "cluster", "data")}
    if any(changed[section] != fields[section] for section in changed):
        job = JobSpec.model_validate_json(json.dumps(fields | changed), strict=True)
    write_output(path, _toml_of(job, stated), option)


def _with_absolute_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of a section with paths that can be followed from a folder, as a reader of its file does."""

    def followed(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [_with_absolute_paths(item, folder) if isinstance(item, dict) else item for item in value]
        is_path = isinstance(value, str) and (name in PATH_FIELDS or (name in NAME_FIELDS and catalog.is_file(value)))
        if not is_path or not value or path_exists(str(folder / value)) or not path_exists(value):
            return value
        return str(Path(value).absolute())

    return {name: followed(name, value) for name, value in values.items()}


def job_toml(job: JobSpec) -> str:
    """The job as TOML text: fields that differ from their defaults, all fields of entries of the catalog, and those
    that the job states and a run on several machines must state."""
    return _toml_of(job, _stated(job))


def _stated(job: JobSpec) -> dict[str, set[str]]:
    """The fields of STATED that a job states, by section."""
    return {section: getattr(job, section).model_fields_set.intersection(names) for section, names in STATED.items()}


def _toml_of(job: JobSpec, stated: Mapping[str, set[str]]) -> str:
    """The job as TOML text, with stated fields even if they have their defaults."""
    fields, all_fields = job.model_dump(exclude_defaults=True), job.model_dump()
    _keep_named(fields, job)
    for section, names in stated.items():
        if kept := {name: all_fields[section][name] for name in STATED[section] if name in names}:
            fields[section] = fields.get(section, {}) | kept
    lines: list[str] = [JOB_BEGINNING, f"name = {value_text(fields.pop('name', job.name))}"]
    for section, values in fields.items():
        lines += ["", *_section(section, values)]
    return "\n".join(lines) + "\n"


def _keep_named(fields: dict[str, Any], job: JobSpec) -> None:
    """Add the fields of catalog entries, even if the job sets one of them back to its default."""
    all_fields = job.model_dump()
    kinds: dict[str, catalog.Kind] = {"model": "models", "cluster": "clusters"}
    for section, kind in kinds.items():
        name = all_fields[section]["name"]
        if name in catalog.names(kind):
            entry_fields = _overlaid(catalog.read(kind, name), all_fields[section], fields.get(section, {}))
            fields[section] = {"name": name} | entry_fields


def _overlaid(entry: dict[str, Any], all_fields: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The fields of `changed`, and the fields of an entry with the job's values."""
    overlaid = dict(changed)
    for key, value in entry.items():
        if isinstance(value, dict) and isinstance(all_fields.get(key), dict):
            overlaid[key] = _overlaid(value, all_fields[key], changed.get(key, {}))
        elif key in all_fields:
            overlaid[key] = all_fields[key]
    return overlaid


def _section(name: str, values: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    yield f"[{name}]"
    yield from (f"{key} = {value_text(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            yield ""
            yield from _section(f"{name}.{key}", value)


_DEVICE_HEAD = "# A device that shardwright calibrate measured; `--set cluster.device=FILE` takes it.\n"


def write_device(path: Path, fields: Mapping[str, Any] | None) -> None:
    """Write the file, complete or not at all. Without fields, only check that it can be written. PlanError if not."""
    text = _DEVICE_HEAD + ("" if fields is None else toml_text(fields))
    replace_output(path, text, "--out", dry_run=fields is None)


def calibrated_text(path: Path, fields: Mapping[str, Any], rows: Sequence[Sequence[str]], language: str) -> str:
    """The measurements of a calibration, and how to use them, in a language."""
    step_text = seconds_text(fields["constants"]["step_s"])
    lines = [
        say("A step takes {step} beside what it computes and sends.", step=step_text),
        say("{source}; written to {path}.", source=fields["source"], path=str(path)),
        say("Price a job with it: shardwright estimate JOB --set cluster.device={path}", path=str(path)),
    ]
    table = aligned([[in_language(cell, language) for cell in row] for row in rows])
    return f"{table}\n\n{in_language(below(lines), language)}"
