"""The catalog of named models, clusters, devices and jobs, one TOML file each. A user's file can replace any of them.

A catalog name may always be replaced by the path of a TOML file with the same fields. Paths in that file (the device of
a cluster, the calibration of a device) are relative to its own folder.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from shardwright.config.phrase import any_of, say
from shardwright.config.toml_file import read_toml
from shardwright.config.user_file import system_reason

Kind = Literal["models", "clusters", "devices", "jobs", "software", "calibrations"]

# Fields of an entry that name another entry.
_NAMING = ("device", "software", "generation", "calibration", "like")


def names(kind: Kind) -> list[str]:
    """Catalog names of one kind, sorted."""
    return list(_names(kind))


@lru_cache(maxsize=16)  # because a search checks thousands of plans for the same devices
def _names(kind: Kind) -> tuple[str, ...]:
    folder = resources.files(__package__) / kind
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def is_file(name: str) -> bool:
    """True if a name is the path of a file rather than the name of an entry."""
    return name.endswith(".toml")


_OTHER_MEMORY = re.compile(r"(?P<device>[^@]+)@(?P<gib>[0-9]{1,10}(\.[0-9]{1,3})?)gib")


def split_memory(device: str) -> tuple[str, str]:
    """(name of a device, the GiB that it has in place of its entry's, or ""): "h100-sxm@94gib" is an h100-sxm in all
    but its memory."""
    match = _OTHER_MEMORY.fullmatch(device)
    return (match["device"], match["gib"]) if match else (device, "")


def has(kind: Kind, name: str) -> bool:
    """True if the catalog has an entry of this name, or a device that differs from it in its memory."""
    return (split_memory(name)[0] if kind == "devices" else name) in names(kind)


def read(kind: Kind, name: str) -> dict[str, Any]:
    """The fields of one entry, with its name. KeyError with the nearest names if there is none. ValueError with the
    fault of a user's file."""
    if is_file(name):
        return _read_file(Path(name))
    if kind == "devices" and name not in names(kind) and has(kind, name):
        device, memory_gib = split_memory(name)
        return read(kind, device) | {"name": name, "memory_gib": float(memory_gib)}
    if name not in names(kind):
        hint = known_hint(kind, name)
        raise KeyError(
            say("{name} is not in the catalog of {kind}; {hint}", name=repr(name), kind=say(kind), hint=hint)
        )
    return {"name": name} | deepcopy(_packaged(kind, name))


@lru_cache(maxsize=512)  # a page reads a few of them at each change
def _packaged(kind: Kind, name: str) -> dict[str, Any]:
    """The fields of an entry of this package. A caller may not change them."""
    return tomllib.loads((resources.files(__package__) / kind / f"{name}.toml").read_text(encoding="utf-8"))


_SAME_SHAPE = re.compile(r"(-(instruct|base|chat|it|hf))+$")  # at the end of a name of the Hub


_ADDRESS = re.compile(
    r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<name>[^/?#]+(/[^/?#]+)?)([/?#].*)?", re.IGNORECASE
)


def asked_model_name(name: str) -> str:
    """The catalog's name of a model as somebody types it: also the address of its page on the Hub, and a name that
    differs in its hyphens, underscores and spaces alone, if one model has it. Another name as it is."""
    match = _ADDRESS.fullmatch(name.strip())
    hub_name = match["name"] if match else name
    known = model_name(hub_name)
    return known if has("models", known) else _models_by_letters().get(_letters(_hub_key(hub_name)), name)


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name)


@lru_cache(maxsize=1)
def _models_by_letters() -> dict[str, str]:
    """The models whose names no other model has, by their names without hyphens."""
    named: dict[str, set[str]] = {}
    for key, model in _models_by_hub_name().items():
        named.setdefault(_letters(key), set()).add(model)
    return {letters: next(iter(models)) for letters, models in named.items() if len(models) == 1}


def model_name(name: str) -> str:
    """The catalog's name of a model that is called as on the Hugging Face Hub, with or without its owner; another name
    as it is.

    Capitals do not matter, and endings that say how the same shape was trained further are passed over:
    Qwen/Qwen3-8B, qwen/qwen3-8b-base and Qwen3-8B are qwen3-8b.
    """
    return _models_by_hub_name().get(_hub_key(name), name)


def hub_names() -> dict[str, list[str]]:
    """hub_names.toml: names of the Hugging Face Hub by name of a model of the catalog."""
    hub: dict[str, list[str]] = tomllib.loads(
        (resources.files(__package__) / "hub_names.toml").read_text(encoding="utf-8")
    )
    return hub


@lru_cache(maxsize=1)
def _models_by_hub_name() -> dict[str, str]:
    models = {_hub_key(hub_name): model for model, hub in hub_names().items() for hub_name in hub}
    without_owner: dict[str, set[str]] = {}
    for key, model in models.items():
        without_owner.setdefault(key.rpartition("/")[2], set()).add(model)
    alone = {key: next(iter(named)) for key, named in without_owner.items() if len(named) == 1}
    return alone | models | {name: name for name in names("models")}


def _hub_key(name: str) -> str:
    # Also Mistral's Instruct before its version.
    return _SAME_SHAPE.sub("", name.lower().replace("-instruct-v", "-v"))


def known_models() -> list[str]:
    """Names of models that a user may write: those of the catalog and those of the Hub."""
    return [*names("models"), *(hub_name for hub in hub_names().values() for hub_name in hub)]


def read_left_out() -> dict[str, dict[str, float]]:
    """left_out.toml: by family of published runs, the calibration constants fitted without that family."""
    return _constants_by_part("left_out.toml")


def read_left_out_generations() -> dict[str, dict[str, float]]:
    """left_out_generations.toml: by generation of devices, the calibration constants fitted without its runs."""
    return _constants_by_part("left_out_generations.toml")


def _constants_by_part(file: str) -> dict[str, dict[str, float]]:
    text = (resources.files(__package__) / file).read_text(encoding="utf-8")
    return {
        part: {name: float(value) for name, value in constants.items()}
        for part, constants in tomllib.loads(text).items()
    }


def read_fitted() -> dict[str, list[str]]:
    """fitted.toml: the calibration constants that are fitted, each with the families of runs whose steps it changes."""
    fitted: dict[str, list[str]] = tomllib.loads(
        (resources.files(__package__) / "fitted.toml").read_text(encoding="utf-8")
    )
    return fitted


def read_measured_runs() -> dict[str, dict[str, dict[str, list[tuple[float, int]]]]]:
    """measured_runs.toml: the runs that constants are fitted to ("fitted") and others ("measured"): for each family and
    "software generation number", the (billions of parameters, devices) of each."""
    return tomllib.loads((resources.files(__package__) / "measured_runs.toml").read_text(encoding="utf-8"))


def read_confidence() -> dict[str, Any]:
    """confidence.toml: the errors of predicted ratios of step times, by the fields that differ between two plans."""
    return tomllib.loads((resources.files(__package__) / "confidence.toml").read_text(encoding="utf-8"))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        fields = {"name": path.stem} | read_toml(path)
    except OSError as error:
        raise ValueError(
            say(
                "{path} can't be read: {reason} (looked from {folder}); check the path",
                path=str(path),
                reason=system_reason(error),
                folder=str(Path.cwd()),
            )
        ) from None
    return fields | {key: found_from(path, fields[key]) for key in _NAMING if key in fields}


def found_from(file: Path, name: Any) -> Any:
    """A name in `file`; if it is a path, made absolute from the folder of `file`."""
    return str((file.parent / name).absolute()) if isinstance(name, str) and is_file(name) else name


_FEWEST_BEGUN = 4  # characters of a name that are told from a slip
_LONGEST_WORD = 100  # characters, because a comparison takes time by the product of both lengths


def abbreviated(word: str, known: Iterable[str]) -> list[str]:
    """The names of several parts that a word abbreviates by their first letters: learning_rate for lr."""
    return [name for name in known if "_" in name and word == "".join(part[:1] for part in name.split("_"))]


def nearest(word: str, known: list[str], most: int = 2) -> list[str]:
    """The names that a word abbreviates (lr for learning_rate), or else those that it begins (qwen3-30b for
    qwen3-30b-a3b), and after them the most similar names, best first."""
    if short := abbreviated(word, known):
        return short[:most]
    begun = [name for name in known if len(word) >= _FEWEST_BEGUN and name.startswith(word)]
    alike = *written_alike(word, begun, most, share=0.0), *written_alike(word, known, most)
    return list(dict.fromkeys(alike))[:most]


def written_alike(word: str, known: list[str], most: int = 2, share: float = 0.6) -> list[str]:
    """The names whose similarity to a word is at least `share`, best first."""
    return difflib.get_close_matches(word[:_LONGEST_WORD], known, n=most, cutoff=share)


_LISTED = ("models", "clusters", "devices", "software")  # kinds that a command of the same name lists
_MOST_LISTED = 12


def known_hint(kind: Kind, name: str) -> str:
    """A way out for a name that no entry of a kind has: the nearest names, or the command that lists the many."""
    known = known_models() if kind == "models" else names(kind)
    if kind in _LISTED and len(known) > _MOST_LISTED and "/" not in name and not nearest(name, known):
        return say("there are {count}, which `shardwright {kind}` lists", count=len(known), kind=kind)
    return did_you_mean(name, known)


def did_you_mean(word: str, known: list[str]) -> str:
    """A way out for an unknown name."""
    if "/" in word and os.path.exists(word):  # also False for a text that can't be a path
        return say("if the file is meant, give it a name that ends in .toml")
    if near := nearest(word, known):
        return say("did you mean {meant}?", meant=any_of(near))
    return say("there are: {names}", names=tuple(known))
