"""Configurations that begin from others: the list `defaults` of Hydra, whose order says which value wins.

Each entry of the list is a file, in the package of its group ("model: gpt" is model/gpt.yaml under "model."), and
`_self_` stands for the file with the list; without it the file comes last (Hydra 1.1, "Composition order").
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.phrase import say
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault

_MOST_LEVELS = 8
_MOST_PATH = 200  # characters
# Groups that say nothing of the model or its training: NeMo's launcher has them.
_BESIDE = (
    "cluster",
    "hydra",
    "data_preparation",
    "quantization",
    "conversion",
    "evaluation",
    "export",
    "data_curation",
    "fine_tuning",
    "peft",
    "prompt_learning",
    "adapter_learning",
    "ia3_learning",
    "fw_inference",
    "rlhf_rm",
    "rlhf_ppo",
    "steerlm_reg",
    "rag_indexing",
    "rag_generation",
    "external_evaluation",
    "search_config",
    "auto_configurator",
)


def composed(texts: Mapping[str, str]) -> dict[str, Any]:
    """The settings of the first file over those that it begins from, then those of files that no list names.

    Raises ShellFault for a file that a list names and that is not there.
    """
    used: set[str] = set()
    first, *others = texts
    flat = _of_file(first, texts, used, 0)
    for name in others:
        if name not in used:
            flat |= {key: value for key, value in flat_keys(read_data(name, texts[name])).items() if key != "defaults"}
    return flat


def named_bases(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The files that a configuration begins from, by the names that its list `defaults` has for them."""
    entries = data.get("defaults")
    paths = [path for _, path in _entries(entries)] if isinstance(entries, list) else []
    return tuple(shortened(_with_suffix(path), 65) for path in paths if path != "_self_")[:_MOST_LEVELS]


def base_paths(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths, from the folder of the configuration or of its group, of the files that it begins from."""
    entries = data.get("defaults")
    paths = [path for _, path in _entries(entries)] if isinstance(entries, list) else []
    plain = [path for path in paths if path != "_self_" and len(path) <= _MOST_PATH]
    return tuple(map(_with_suffix, plain))[:_MOST_LEVELS]


def _with_suffix(path: str) -> str:
    """The file of a path in a list, which may leave out its suffix."""
    return path if path.endswith((".yaml", ".yml")) else f"{path}.yaml"


def _of_file(name: str, texts: Mapping[str, str], used: set[str], level: int) -> dict[str, Any]:
    if level > _MOST_LEVELS:
        raise ShellFault(
            say(
                "{name}: configurations begin from one another, more than {most} levels deep; check them",
                name=name,
                most=_MOST_LEVELS,
            )
        )
    used.add(name)
    data = read_data(name, texts[name])
    entries = data.pop("defaults", None)
    own = flat_keys(data)
    if not isinstance(entries, list):
        return own
    if "_self_" not in entries:
        entries = [*entries, "_self_"]
    flat: dict[str, Any] = {}
    for package, path in _entries(entries):
        if path == "_self_":
            flat |= own
            continue
        file = _file_of(path, texts)
        if file is None:
            raise ShellFault(
                say(
                    "{name} begins from {file} (Hydra's defaults), which is none of the files; name it too",
                    name=name,
                    file=shortened(_with_suffix(path), 85),
                )
            )
        inner = _of_file(file, texts, used, level + 1)
        is_global = "@package _global_" in texts[file][:200]
        flat |= inner if is_global or not package else {f"{package}.{key}": value for key, value in inner.items()}
    return flat


def _entries(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """(package, path without suffix) of the entries that name a file with settings of a model."""
    for entry in entries:
        if isinstance(entry, str):
            yield "", entry
        elif isinstance(entry, dict) and len(entry) == 1:
            ((group, name),) = entry.items()
            words = str(group).split()
            path, _, package = words[-1].partition("@")
            is_beside = words[0] in ("optional", "override") or path.lstrip("/").partition("/")[0] in _BESIDE
            if not is_beside and isinstance(name, str):
                yield package.rstrip(":") or path.strip("/").replace("/", "."), f"{path.strip('/')}/{name}"


def _file_of(path: str, texts: Mapping[str, str]) -> str | None:
    """The file of a path: the one that shares the most folders with it."""
    stem = re.sub(r"\.ya?ml$", "", path)
    name = PurePath(stem).name
    alike = [file for file in texts if PurePath(file).stem == name or PurePath(file).name == name]
    exact = [file for file in alike if str(PurePath(file).with_suffix("")).endswith(stem)]
    return next(iter(exact or alike), None)
