"""Replace names in a job by the fields that they stand for: models, clusters, and the tokenizer of weights."""

from pathlib import Path
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.hugging_face.config_json import MERGE, is_adapter, names_config, path_of, read_model
from shardwright.config.phrase import say
from shardwright.config.user_file import path_exists

# Sections whose `name` stands for other fields -> the catalog's folder of such entries.
_KINDS: dict[str, catalog.Kind] = {"model": "models", "cluster": "clusters"}


def resolve_names(fields: dict[str, Any]) -> list[str]:
    """Fill in the fields of a named model or cluster, in place; fields beside the name override the catalog's. A model
    may be a config.json or a folder with one; without a name, it is the model of its weights. Returns faults."""
    faults = list[str]()
    for section in _KINDS:
        values = fields.get(section)
        if not isinstance(values, dict):
            continue
        if section == "model" and "name" not in values and values.get("weights"):
            faults += _weights_faults(values)
            values = {"name": values["weights"]} | values
        if isinstance(values.get("name"), str):
            entry, entry_faults = _entry(section, values["name"], is_alone=len(values) == 1)
            faults += entry_faults
            if entry is not None:
                fields[section] = _laid_over(entry, values) | {"name": entry["name"]}
    return faults


def _entry(section: str, name: str, *, is_alone: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """The fields that the name of a section stands for, None if it is a mere name, and faults.

    `is_alone`: the section has no other field, so that the name has to stand for some.
    """
    kind = _KINDS[section]
    if section == "model" and names_config(name):
        try:
            return read_model(name), []
        except PlanError as error:
            return None, [say("{subject}: {fault}", subject=error.subject, fault=fault) for fault in error.faults]
    known_name = name
    if section == "model":
        known_name = catalog.asked_model_name(name) if is_alone else catalog.model_name(name)
    if catalog.is_file(known_name) or known_name in catalog.names(kind):
        try:
            return catalog.read(kind, known_name), []
        except ValueError as error:
            return None, [say("{section}.name: {error}", section=section, error=error_text(error))]
    return None, [_unknown_name(section, name)] if is_alone else []


def _unknown_name(section: str, name: str) -> str:
    """The fault of a name that stands for nothing, of a section that has no other field."""
    if "/" in name and not path_exists(name):
        return say(
            "{section}.name {name}: there is no such file or folder (looked from {folder}); check it",
            section=section,
            name=repr(shortened(name, 200)),
            folder=str(Path.cwd()),
        )
    return say(
        "{section}.name {name} is not in the catalog, and no other field describes the {section}; {hint}",
        section=section,
        name=repr(shortened(name, 200)),
        hint=catalog.known_hint(_KINDS[section], name),
    )


def take_tokenizer(fields: dict[str, Any]) -> None:
    """Set the tokenizer to that of the weights with which training begins, if the job names no tokenizer."""
    model, data = fields.get("model"), fields.get("data", {})
    weights = model.get("weights") if isinstance(model, dict) else None
    if isinstance(weights, str) and isinstance(data, dict) and "tokenizer" not in data and names_config(weights):
        folder = path_of(weights).parent
        if (folder / "tokenizer.json").is_file():
            fields["data"] = data | {"tokenizer": str(folder)}


def _weights_faults(model: dict[str, Any]) -> list[str]:
    """The fault of a job that describes its model only by weights, if there is no config.json with them."""
    weights = model["weights"]
    if not isinstance(weights, str) or names_config(weights) or "layers" in model or "hidden" in model:
        return []
    shown = repr(shortened(weights, 200))
    if is_adapter(weights):
        return [say("model.weights {weights} is {merge}", weights=shown, merge=MERGE)]
    if path_exists(weights):
        return [
            say(
                "model.weights {weights} has no config.json, and no other field says what the model is; name a "
                "folder of Hugging Face's, or the model in model.name",
                weights=shown,
            )
        ]
    return [
        say(
            "model.weights {weights} is not there (looked from {folder}), and no other field says what the model is; "
            "name a folder of Hugging Face's, or the model in model.name",
            weights=shown,
            folder=str(Path.cwd()),
        )
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
