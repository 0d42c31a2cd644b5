"""Read the fields of a job, as a file or the catalog has them."""

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError, error_text
from shardwright.config.hugging_face.config_json import MERGE, is_adapter, names_config
from shardwright.config.phrase import any_of, either, say
from shardwright.config.plain_values import plain
from shardwright.config.run_file_names import CARD, METRICS
from shardwright.config.toml_file import read_toml
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, path_exists, read_text, system_reason

# Fields of a job that name an entry of the catalog, or a user's file.
_NAMING = (("model", "name"), ("cluster", "name"), ("cluster", "device"), ("cluster", "software"))
NAME_FIELDS = tuple(dict.fromkeys(field for _, field in _NAMING))
_DATA_PATHS = ("path", "tokenizer", "chat_template")
_MOST_BYTES = 8 * MIB  # of the card of a run
_SUFFIX, _MOST_ENTRIES = ".toml", 10_000  # of files of jobs; entries of a folder that are looked at
PATH_FIELDS = ("weights", *_DATA_PATHS)  # fields of a job that are paths


def names_model(job: str | Mapping[str, Any]) -> bool:
    """True if JOB names a model: of the catalog, a config.json, or a folder with one."""
    if not isinstance(job, str) or job in catalog.names("jobs"):
        return False
    models = catalog.names("models")
    is_known = catalog.model_name(job) in models or (catalog.asked_model_name(job) in models and not path_exists(job))
    return is_known or names_config(job)


def read_fields(job: str | Mapping[str, Any], subject: str) -> dict[str, Any]:
    """The fields of a job, nested, from a mapping, the catalog or a TOML file; of a model its name alone. Raises
    PlanError with the fault of a file."""
    if not isinstance(job, str):
        fields: dict[str, Any] = plain(job)
        return fields
    if names_model(job):
        return _job_of_model(job)
    if job in catalog.names("jobs"):
        return catalog.read("jobs", job)
    try:
        return _read_toml(job)
    except OSError as error:
        fault: str = say(
            "{path} can't be read: {reason}; check the path and its permissions", path=job, reason=system_reason(error)
        )
    except ValueError as error:
        fault = error_text(error)
    raise PlanError(subject, [fault])


def _job_of_model(model: str) -> dict[str, Any]:
    """The fields of a job for a model of the catalog or of a config.json."""
    path = Path(model)
    if not names_config(model):
        model = name = catalog.asked_model_name(model)
    else:
        name = (path.absolute().parent if path.suffix == ".json" else path.absolute()).name
    return {"name": name or "model", "model": {"name": model}}


def _folder_fault(job: str) -> str:
    """The fault of a folder that is named as a job, and has no config.json."""
    path = Path(job)
    if is_adapter(path):
        return say("{path} is {fault}", path=job, fault=MERGE)
    if (path / METRICS).is_file():
        return say(
            "{path} is the folder of a run, which `shardwright runs`, `top`, `report` and `generate` read; name the "
            "TOML file or catalog name of its job",
            path=job,
        )
    return say("{path} is a folder; name the TOML file of a job in it, or a folder that has a config.json", path=job)


def _job_of_run(folder: Path) -> dict[str, Any] | None:
    """The fields of a run's job, as the card in its folder has them; None if there is no such card. Raises ValueError
    or OSError."""
    card = folder / CARD
    if not (card.is_file() and (folder / METRICS).is_file()):
        return None
    try:
        fields = json.loads(read_text(card, _MOST_BYTES, say("card of a run")))["job"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        reason = error_text(error)
        raise ValueError(
            say("{path} is no card of a run: {reason}; name the TOML file of its job", path=str(card), reason=reason)
        ) from None
    if not isinstance(fields, dict):
        raise ValueError(say("{path} is no card of a run; name the TOML file of its job", path=str(card)))
    return fields


def _read_toml(job: str) -> dict[str, Any]:
    """The fields in a file. Raises ValueError with the fault, or OSError."""
    path = Path(job)
    try:
        if not job:
            raise FileNotFoundError
        if path.is_dir():
            if (of_run := _job_of_run(path)) is not None:
                return of_run
            raise ValueError(_folder_fault(job))
        fields = _fields_in(path)
    except (FileNotFoundError, NotADirectoryError):
        near_hub = catalog.nearest(job, catalog.known_models()) if job.count("/") == 1 else []
        if "://" in job:
            raise ValueError(
                say(
                    "{address} is an address, and nothing is loaded from the network; name a model that `shardwright "
                    "models` lists, or the config.json that you download from there",
                    address=job,
                )
            ) from None
        if path.suffix == ".toml" or ("/" in job and not near_hub):
            hint = say("check the path")
            if near := _near_files(path):
                hint = say("did you mean {meant}?", meant=any_of(near))
            raise ValueError(
                say(
                    "there is no file {path} (looked from {folder}); {hint}",
                    path=job,
                    folder=str(Path.cwd()),
                    hint=hint,
                )
            ) from None
        raise ValueError(
            say(
                "{name} is neither a job nor a model of the catalog, nor a file; {hint}",
                name=repr(job),
                hint=_name_hint(job),
            )
        ) from None
    for section, field in _NAMING:
        values = fields.get(section)
        if isinstance(values, dict) and field in values:
            values[field] = catalog.found_from(path, values[field])
    _resolve_paths(path, fields.get("model"), ("name",), names_config)
    model = fields.get("model")
    for with_weights in (model, model.get("adapter") if isinstance(model, dict) else None):
        _resolve_paths(path, with_weights, ("weights",), path_exists)
    data = fields.get("data")
    lists = [data.get(name) for name in ("sources", "validation")] if isinstance(data, dict) else []
    for source in (data, *(entry for entries in lists if isinstance(entries, list) for entry in entries)):
        _resolve_paths(path, source, _DATA_PATHS, path_exists)
    return {"name": path.stem} | fields


_DATA = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".parquet", ".arrow", ".bin", ".npy", ".gz", ".zst")


def _fields_in(path: Path) -> dict[str, Any]:
    """The fields in a TOML file. Raises FileFault or OSError."""
    try:
        return read_toml(path, say("a job is a TOML file"))
    except FileFault:
        if path.suffix.lower() not in _DATA:
            raise
    raise FileFault(
        say(
            "{path} is no job, which is a TOML file, and its name is that of data: a job reads it by data.path, as "
            "--set data.path={path}",
            path=path,
        )
    )


def _resolve_paths(job: Path, section: Any, field_names: Sequence[str], exists: Callable[[str], bool]) -> None:
    """Replace paths in fields, in place, by paths in the folder of the job's file, if they exist there."""
    for field in field_names if isinstance(section, dict) else ():
        name = section.get(field)
        if isinstance(name, str) and name and exists(resolved := str((job.parent / name).absolute())):
            section[field] = resolved


def _near_files(path: Path) -> list[str]:
    """Files of jobs in the folder of a file that is not there, whose names are like its own."""
    if "\0" in str(path):
        return []
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_ENTRIES) if entry.name.endswith(_SUFFIX)]
    except OSError:
        return []
    files = {name.removesuffix(_SUFFIX): name for name in sorted(names)}
    return [str(path.parent / files[stem]) for stem in get_close_matches(path.stem, files)]


def _name_hint(name: str) -> str:
    """A way out for a name that is neither a job nor a model."""
    jobs, models = catalog.names("jobs"), catalog.names("models")
    near = catalog.nearest(name, sorted({*jobs, *(models if "/" not in name else catalog.known_models())}), most=4)
    files = [] if "/" in name else _near_files(Path(name))
    if near or files:
        kinds = [say("{name} (a file)", name=file) for file in files]
        kinds += [
            say("{name} (a job)", name=candidate) if candidate in jobs else say("{name} (a model)", name=candidate)
            for candidate in near
        ]
        return say("did you mean {meant}?", meant=either(kinds))
    return say(
        "there are the jobs {jobs}, and {count} models, which `shardwright models` lists",
        jobs=tuple(jobs),
        count=len(models),
    )
