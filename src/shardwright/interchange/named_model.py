"""The model that a configuration of another system names: by a config.json, or a name of the catalog or the Hub."""

import json
import re
from collections.abc import Mapping
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.hugging_face.config_json import fields_of, notes_of
from shardwright.config.named_entries import resolve_names
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked
from shardwright.interchange.reading.settings import Flat, Settings

_OF_USER = ("model.name", "model.weights", "model.layers")


# Words in names of models whose weights are quantised.
_QUANTISED = re.compile(
    r"(?i)(?<![a-z0-9])(gptq|awq|aqlm|hqq|nf4|gguf|bnb[-_]?4bit|[48]-?bits?|int[248]|fp[48]|w[48]a(?:8|16)|mxfp4)(?![a-z0-9])"
)
_OF_PROGRAMS = {"base_model", "learning_rate", "defaults", "lr", "batch_size", "num_train_epochs"}


def is_model(data: Mapping[str, Any]) -> bool:
    """True if the keys are those of a config.json, and none is of a program that trains (axolotl has model_type) or of
    Hydra's."""
    return ("model_type" in data or "text_config" in data) and not _OF_PROGRAMS & data.keys()


def read_named_model(keys: dict[str, Any] | None, names: tuple[str, ...], asked: Asked, settings: Settings) -> Flat:
    """Fields of the model: by the keys of its config.json, else by the Hub's name in one of the settings `names`, if
    the catalog has that model. Without both there is a fault, unless --set says what the model is."""
    name = next((name for name in names if isinstance(settings.given.get(name), str)), "")
    settings.ignore(name)
    if keys is not None:
        settings.family = str(keys.get("model_type", ""))
        return _config_fields(keys, settings)
    if _QUANTISED.search(str(settings.given.get(name, ""))):
        settings.lost.append(
            say(
                "{setting} has quantised weights by its name, and weights are counted in the number type of compute "
                "here, not quantised",
                setting=settings.setting_text(name),
            )
        )
    if any(field in asked.fields for field in _OF_USER):
        return {}
    text = str(settings.given.get(name, ""))
    entry = catalog.model_name(text.rstrip("/"))
    if entry in catalog.names("models"):
        settings.family = entry.partition("-")[0]
        settings.note(
            say(
                "the model is the catalog's {entry}, by {setting} (a config.json says more)",
                entry=entry,
                setting=settings.setting_text(name),
            )
        )
        return {"model.name": entry}
    if entry := _by_folder(text):
        settings.note(
            say(
                "the model is the catalog's {entry}, by the folder {folder} that {setting} ends with (a config.json "
                "says more)",
                entry=entry,
                folder=shortened(text.rstrip("/").rpartition("/")[2], 60),
                setting=name,
            )
        )
        return {"model.name": entry}
    reason = say("nothing says what the model is")
    if text:
        reason = say("{setting} is not in the catalog", setting=settings.setting_text(name))
    settings.faults.append(
        say(
            "{reason}; name its config.json as a further file, or --set model.name=NAME of the catalog",
            reason=shortened(reason, 200),
        )
    )
    return {}


def _by_folder(path: str) -> str:
    """The catalog's model that is called as the folder at the end of a path, alone or with the one before it, as
    copies of the Hub's models are; empty if there is none."""
    parts = [_as_on_hub(part) for part in path.rstrip("/").split("/")]
    ends = [part for part in parts if part and not _OF_CACHE.fullmatch(part)]
    if len(parts) < 2 or not ends:
        return ""
    named = (catalog.model_name(name) for name in ("/".join(ends[-2:]), ends[-1]))
    return next((entry for entry in named if entry in catalog.names("models")), "")


def entry_of_path(path: str) -> str:
    """The catalog's model that a folder of a path is called after, the last such one; empty if there is none."""
    parts = path.rstrip("/").split("/")
    return next((entry for end in range(len(parts), 0, -1) if (entry := _by_folder("/" + "/".join(parts[:end])))), "")


_OF_CACHE = re.compile(r"snapshots|[0-9a-f]{40}|master|main|hf|HF|model|weights")  # folders below that of a model


# The ending that converters to Megatron-LM's formats give a model's name, with the degrees of the plan behind it.
_CONVERTED = re.compile(r"(?i)[-_.](?:hf[-_.])?(?:to[-_.])?(?:mcore|megatron|torch[-_]dist|mg|dcp)(?:[-_.].*)?$")


def _as_on_hub(part: str) -> str:
    """A folder by the name of its model: in caches it is models--OWNER--NAME, ModelScope's have ___ for a dot, and
    converted ones say into what."""
    return _CONVERTED.sub("", part.removeprefix("models--").rpartition("--")[2].replace("___", "."))


def changed_keys(keys: dict[str, Any] | None, names: tuple[str, ...], settings: Settings) -> dict[str, Any] | None:
    """Keys of config.json with those that --config_overrides changes. A new model, whose type is said and whose name is
    in none of the settings `names`, has the defaults of its type."""
    pairs = [pair.partition("=") for pair in settings.text("--config_overrides").split(",")]
    changed = {name.strip(): _scalar(value.strip()) for name, equals, value in pairs if equals}
    if keys is None and settings.has("--model_type") and not settings.has(*names):
        keys = {"model_type": settings.text("--model_type")}
    if changed and keys is None:
        setting = settings.setting_text("--config_overrides")
        settings.faults.append(say("{setting}: name the config.json that it changes", setting=setting))
    return None if keys is None else keys | changed


def _scalar(word: str) -> Any:
    """The value of a word of --config_overrides: a number, true or false, or the word itself."""
    try:
        return json.loads(word.lower() if word in ("True", "False") else word)
    except (ValueError, RecursionError):
        return word


def shape_fields(fields: Flat, asked: Asked) -> Flat:
    """All fields of the model that `fields` or --set names; without a name `fields` as they are."""
    name = asked.fields.get("model.name") or fields.get("model.name")
    if not isinstance(name, str):
        return fields
    section = {"model": {"name": name}}
    return fields if resolve_names(section) else flat_keys(section["model"], "model.") | fields


def asks_for_shape(setting: str, settings: Settings, asked: Asked) -> bool:
    """Ask for the model of a file that is not read here. `setting`, with its value, names the file. True if --set does
    not say the model; then there is a fault."""
    if any(field in asked.fields for field in ("model.name", "model.layers")):
        return False
    settings.faults.append(
        say(
            "{setting} has the model, and is not read here; say what it is with --set model.name=NAME of the catalog",
            setting=setting,
        )
    )
    return True


def length_of_named(fields: Flat, settings: Settings) -> int:
    """The longest sequence of the model that `fields` or --set names, which a job has where nothing says another; 0 if
    there is none, or if --set says the length."""
    name = settings.overrides.get("model.name") or fields.get("model.name")
    section = {"model": {"name": name}}
    if not isinstance(name, str) or "model.sequence" in settings.overrides or resolve_names(section):
        return 0
    length = section["model"].get("sequence")
    return length if isinstance(length, int) else 0


def _config_fields(keys: dict[str, Any], settings: Settings) -> Flat:
    model_fields, faults = fields_of(keys)
    settings.notes += notes_of(keys)
    settings.faults += [say("config.json: {fault}; name another if it is not meant", fault=fault) for fault in faults]
    coefficient = keys.get("router_aux_loss_coef")
    if (
        "moe" in model_fields
        and keys.get("output_router_logits") is True
        and isinstance(coefficient, (int, float))
        and coefficient > 0
    ):
        model_fields["moe"] |= {"aux_loss": "switch", "aux_coefficient": float(coefficient)}
    return flat_keys(model_fields, "model.")
