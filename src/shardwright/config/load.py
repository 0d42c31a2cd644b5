"""Load a JobSpec from a TOML file or a catalog name with `--set` overrides, and check it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwright.config import catalog
from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.checks.check import faults_without_plan, job_faults
from shardwright.config.hugging_face.config_json import MERGE, is_adapter, names_config, path_of, read_model
from shardwright.config.job import JobSpec
from shardwright.config.model_job import with_usual
from shardwright.config.optimizer import with_fitting_warmup
from shardwright.config.plain_values import plain
from shardwright.config.secret_addresses import password_faults
from shardwright.config.toml_file import TOML_ERRORS, parse_toml, read_toml, value_faults
from shardwright.config.validation_messages import described

# Fields of a job that name an entry of the catalog, or a user's file.
_NAMING = (("model", "name"), ("cluster", "name"), ("cluster", "device"), ("cluster", "software"))

_MOST_KEYS = 3  # in the path of a field


@dataclass(frozen=True)
class JobFields:
    """The fields of a job, nested as in a file. `is_model` if JOB names a model, not a job; `filled_in` is a text about
    the values that such a job has by default."""

    fields: dict[str, Any]
    is_model: bool = False
    filled_in: str = ""


def load_job(job: str, overrides: list[str] | None = None) -> JobSpec:
    """Read, override, validate and check a job.

    `job` is the path of a TOML file or a catalog name; `overrides` are "section.field=value" strings.
    Raises PlanError with every fault found.
    """
    return make_job(read_job(job, overrides or []).fields, f"job {job}")


def job_of_fields(fields: dict[str, Any], overrides: list[str], subject: str) -> JobSpec:
    """A job from fields nested as in a file, with overrides. Raises PlanError with every fault."""
    faults = [fault for override in overrides for fault in _apply_override(fields, override)]
    if faults := password_faults(fields) or faults + _resolve_catalog_names(fields):
        raise PlanError(subject, faults)
    _take_tokenizer(fields)
    return make_job(fields, subject)


def job_to_plan(fields: dict[str, Any], subject: str) -> JobSpec:
    """A job for which a plan is to be searched: all but its own plan is checked. Raises PlanError with every fault."""
    spec, faults = validate_fields(fields)
    if faults := faults or faults_without_plan(spec):
        raise PlanError(subject, faults)
    return spec


def subject_of(job: str | Mapping[str, Any]) -> str:
    """The subject of messages about a job: its file, its name, or the name in its fields."""
    return f"job {job if isinstance(job, str) else job.get('name', JobSpec.model_fields['name'].default)}"


def read_job(job: str | Mapping[str, Any], overrides: list[str], asked: AskedCluster = NOTHING_ASKED) -> JobFields:
    """The fields of a file, of the catalog or of a mapping, on the cluster of `asked`, with overrides. Raises
    PlanError."""
    subject = subject_of(job)
    is_model = isinstance(job, str) and (
        job not in catalog.names("jobs") and (job in catalog.names("models") or names_config(job))
    )
    fields = plain(job) if not isinstance(job, str) else _job_of_model(job) if is_model else _read_fields(job, subject)
    faults = _replace_cluster(fields, asked)
    faults += [fault for override in overrides for fault in _apply_override(fields, override)]
    if secrets := password_faults(fields):  # first, because other faults would quote the passwords
        raise PlanError(subject, secrets)
    faults += _resolve_catalog_names(fields)
    if faults:  # later faults would follow from an unknown name and confuse; faults of single fields hold anyway
        raise PlanError(subject, faults + validate_fields(fields)[1])
    _take_tokenizer(fields)
    note = _fit_warmup(fields, overrides)
    filled = _filled_in(fields, subject) if is_model else JobFields(fields)
    return replace(filled, filled_in="; ".join(filter(None, (filled.filled_in, note))))


def _fit_warmup(fields: dict[str, Any], overrides: list[str]) -> str:
    """Shorten the warm-up in place if the user sets fewer steps, but not the warm-up. Returns a note about it."""
    section = fields.get("optimizer")
    if not isinstance(section, dict):
        return ""
    keys = {override.partition("=")[0].strip() for override in overrides}
    is_asked = "optimizer.warmup_steps" in keys or ("warmup_steps" in section and "optimizer.steps" not in keys)
    fields["optimizer"], note = with_fitting_warmup(section, is_asked)
    return note


def _job_of_model(model: str) -> dict[str, Any]:
    """The fields of a job for a model of the catalog or of a config.json."""
    path = Path(model)
    name = (
        (path.absolute().parent if path.suffix == ".json" else path.absolute()).name if names_config(model) else model
    )
    return {"name": name or "model", "model": {"name": model}}


def _replace_cluster(fields: dict[str, Any], asked: AskedCluster) -> list[str]:
    """Replace the cluster in place by the cluster that is asked for. Returns faults."""
    section = fields.get("cluster", {})
    if asked == NOTHING_ASKED or not isinstance(section, dict):
        return []
    resolved = {"cluster": dict(section)}
    if faults := _resolve_catalog_names(resolved):
        return faults
    try:
        fields["cluster"] = asked.over(resolved["cluster"])
    except ValueError as error:
        return [str(error)]
    return []


def _filled_in(fields: dict[str, Any], subject: str) -> JobFields:
    """The fields of a job for a model, with usual values filled in."""
    spec = job_to_plan(fields, subject)
    cluster = spec.cluster
    if cluster.device == "unknown" and not cluster.parts:
        raise PlanError(
            subject,
            [
                f"{spec.name!r} is a model, and a job is a model on a cluster: `shardwright plan {spec.name} --devices "
                "64 --device h100-sxm` finds its plans, and with --toml FILE writes a job; estimate, explain, simulate "
                "and scale take --devices and --device too"
            ],
        )
    plan = dict(fields.get("plan", {}))
    shared = spec.plan.world // spec.plan.dp
    if plan and "dp" not in plan and cluster.num_devices % shared == 0:
        fields = fields | {"plan": plan | {"dp": max(1, cluster.num_devices // shared)}}
    if cluster.parts:
        return JobFields(fields, is_model=True)
    filled, notes = with_usual(fields, spec.model, cluster, spec.plan.world)
    return JobFields(filled, is_model=True, filled_in=notes)


def make_job(fields: dict[str, Any], subject: str = "job") -> JobSpec:
    """Validate and check nested fields. Raises PlanError with every fault found."""
    job, faults = validate_fields(fields)
    faults = faults or job_faults(job)
    if faults:
        raise PlanError(subject, faults)
    return job


def validate_fields(fields: dict[str, Any]) -> tuple[JobSpec, list[str]]:
    """(the job, faults of single fields); the default job if there are faults."""
    if faults := value_faults(fields) or password_faults(fields):
        return JobSpec(), faults
    try:
        # Through JSON, because in JSON pydantic's strict mode accepts a list for a tuple and an int for a float.
        return JobSpec.model_validate_json(json.dumps(fields, default=str), strict=True), []
    except ValidationError as error:
        return JobSpec(), described(error, JobSpec)


def _read_fields(job: str, subject: str) -> dict[str, Any]:
    if job in catalog.names("jobs"):
        return catalog.read("jobs", job)
    try:
        return _read_toml(job)
    except OSError as error:
        fault = f"{job} can't be read: {error.strerror}; check the path and its permissions"
    except ValueError as error:
        fault = str(error)
    raise PlanError(subject, [fault])


def _read_toml(job: str) -> dict[str, Any]:
    """The fields in a file. Raises ValueError with the fault, or OSError."""
    path = Path(job)
    try:
        if not job:
            raise FileNotFoundError
        if path.is_dir():
            fault = "is a folder; name the TOML file of a job in it, or a folder that has a config.json"
            raise ValueError(f"{job} {fault}")
        fields = read_toml(path, "a job is a TOML file")
    except (FileNotFoundError, NotADirectoryError):
        if path.suffix == ".toml" or "/" in job:
            raise ValueError(f"there is no file {job} (looked from {Path.cwd()}); check the path") from None
        raise ValueError(
            f"{job!r} is neither a job nor a model of the catalog, nor a file; {_name_hint(job)}"
        ) from None
    for section, field in _NAMING:
        values = fields.get(section)
        if isinstance(values, dict) and field in values:
            values[field] = catalog.found_from(path, values[field])
    _resolve_paths(path, fields.get("model"), ("name",), names_config)
    _resolve_paths(path, fields.get("model"), ("weights",), _exists)
    data = fields.get("data")
    lists = [data.get(name) for name in ("sources", "validation")] if isinstance(data, dict) else []
    for source in (data, *(entry for entries in lists if isinstance(entries, list) for entry in entries)):
        _resolve_paths(path, source, ("path", "tokenizer", "chat_template"), _exists)
    return {"name": path.stem} | fields


def _resolve_paths(job: Path, section: Any, field_names: Sequence[str], exists: Callable[[str], bool]) -> None:
    """Replace paths in fields, in place, by paths in the folder of the job's file, if they exist there."""
    for field in field_names if isinstance(section, dict) else ():
        name = section.get(field)
        if isinstance(name, str) and name and exists(resolved := str((job.parent / name).absolute())):
            section[field] = resolved


def _exists(path: str) -> bool:
    """True if there is a file or folder of that path."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _take_tokenizer(fields: dict[str, Any]) -> None:
    """Set the tokenizer to that of the weights with which training begins, if the job names no tokenizer."""
    model, data = fields.get("model"), fields.get("data", {})
    weights = model.get("weights") if isinstance(model, dict) else None
    if isinstance(weights, str) and isinstance(data, dict) and "tokenizer" not in data and names_config(weights):
        folder = path_of(weights).parent
        if (folder / "tokenizer.json").is_file():
            fields["data"] = data | {"tokenizer": str(folder)}


def _name_hint(name: str) -> str:
    """A way out for a name that is neither a job nor a model."""
    jobs, models = catalog.names("jobs"), catalog.names("models")
    near = catalog.nearest(name, sorted({*jobs, *models}), most=4)
    if near:
        kinds = [f"{candidate} (a {'job' if candidate in jobs else 'model'})" for candidate in near]
        return f"did you mean {' or '.join(kinds)}?"
    return f"there are the jobs {', '.join(jobs)}, and the models {', '.join(models)}"


def _apply_override(fields: dict[str, Any], override: str) -> list[str]:
    """Set one "a.b=value" in place. The value is TOML, or else a string. Returns faults."""
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        return [f"--set {shortened(override, 80)!r} is not of the form section.field=value, such as plan.tp=4"]
    if len(keys) > _MOST_KEYS:
        return [
            f"--set {shortened(override, 80)!r} names {len(keys)} sections within each other, and fields are at most "
            f"{_MOST_KEYS} deep, such as model.moe.experts"
        ]
    try:
        parsed = parse_toml(f"value = {text}")
    except TOML_ERRORS:
        parsed = {}
    value = parsed["value"] if len(parsed) == 1 else text  # a line break in the text could begin another key
    target = fields
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            return [
                f"--set {shortened(override, 80)!r}: {key} is a value, not a section; set it without what follows {key}"
            ]
    target[keys[-1]] = value
    return []


def _resolve_catalog_names(fields: dict[str, Any]) -> list[str]:
    """Fill in the fields of a named model or cluster, in place; fields beside the name override the catalog's. A model
    may be a config.json or a folder with one; without a name, it is the model of its weights. Returns faults."""
    faults = list[str]()
    for section, kind in (("model", "models"), ("cluster", "clusters")):
        values = fields.get(section)
        if section == "model" and isinstance(values, dict) and "name" not in values and values.get("weights"):
            faults += _weights_faults(values)
            values = {"name": values["weights"]} | values
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            continue
        name = values["name"]
        if section == "model" and names_config(name):
            try:
                entry = read_model(name)
            except PlanError as error:
                faults += [f"{error.subject}: {fault}" for fault in error.faults]
            else:
                fields[section] = _laid_over(entry, values) | {"name": entry["name"]}
            continue
        if catalog.is_file(name):
            try:
                entry = catalog.read(kind, name)  # type: ignore[arg-type]
            except ValueError as error:
                faults.append(f"{section}.name: {error}")
            else:
                fields[section] = _laid_over(entry, values) | {"name": entry["name"]}
        elif name in catalog.names(kind):  # type: ignore[arg-type]
            fields[section] = _laid_over(catalog.read(kind, name), values)  # type: ignore[arg-type]
        elif len(values) == 1:  # a name and nothing else can only mean the catalog
            hint = catalog.did_you_mean(values["name"], catalog.names(kind))  # type: ignore[arg-type]
            faults.append(
                f"{section}.name {values['name']!r} is not in the catalog, and no other field describes the {section}; "
                + hint
            )
    return faults


def _weights_faults(model: dict[str, Any]) -> list[str]:
    """The fault of a job that describes its model only by weights, if there is no config.json with them."""
    weights = model["weights"]
    if not isinstance(weights, str) or names_config(weights) or "layers" in model or "hidden" in model:
        return []
    fault = "has no config.json" if _exists(weights) else f"is not there (looked from {Path.cwd()})"
    if is_adapter(weights):
        return [f"model.weights {shortened(weights, 200)!r} is {MERGE}"]
    return [
        f"model.weights {shortened(weights, 200)!r} {fault}, and no other field says what the model is; name a folder "
        "of Hugging Face's, or the model in model.name"
    ]


def _laid_over(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields with values replaced by overrides, section by section."""
    pairs = {name: (fields[name], value) for name, value in overrides.items() if name in fields}
    sections = {
        name: _laid_over(old, new)
        for name, (old, new) in pairs.items()
        if isinstance(old, dict) and isinstance(new, dict)
    }
    return fields | overrides | sections
