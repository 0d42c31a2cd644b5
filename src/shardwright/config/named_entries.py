"""Replace names in a job by the fields that they stand for: models, clusters, and the tokenizer of weights."""

from pathlib import Path
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.hugging_face.config_json import MERGE, is_adapter, names_config, path_of, read_model
from shardwright.config.phrase import say
from shardwright.config.user_file import path_exists


def resolve_names(fields: dict[str, Any]) -> list[str]:
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
                faults += [say("{subject}: {fault}", subject=error.subject, fault=fault) for fault in error.faults]
            else:
                fields[section] = _laid_over(entry, values) | {"name": entry["name"]}
            continue
        if section == "model":
            name = catalog.model_name(name) if len(values) > 1 else catalog.asked_model_name(name)
            values = values | {"name": name}
        if catalog.is_file(name):
            try:
                entry = catalog.read(kind, name)  # type: ignore[arg-type]
            except ValueError as error:
                faults.append(say("{section}.name: {error}", section=section, error=error_text(error)))
            else:
                fields[section] = _laid_over(entry, values) | {"name": entry["name"]}
        elif name in catalog.names(kind):  # type: ignore[arg-type]
            fields[section] = _laid_over(catalog.read(kind, name), values)  # type: ignore[arg-type]
        elif len(values) == 1 and "/" in name and not path_exists(name):
            faults.append(
                say(
                    "{section}.name {name}: there is no such file or folder (looked from {folder}); check it",
                    section=section,
                    name=repr(shortened(name, 200)),
                    folder=str(Path.cwd()),
                )
            )
        elif len(values) == 1:  # a name and nothing else can only mean the catalog
            known = catalog.known_models() if section == "model" else catalog.names(kind)  # type: ignore[arg-type]
            hint = catalog.did_you_mean(values["name"], known)
            faults.append(
                say(
                    "{section}.name {name} is not in the catalog, and no other field describes the {section}; {hint}",
                    section=section,
                    name=repr(values["name"]),
                    hint=hint,
                )
            )
    return faults


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
