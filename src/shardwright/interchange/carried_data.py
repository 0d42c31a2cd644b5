"""The data and the tokenizer that files of another system name, if they are on this machine.

Only paths are checked here: a prefix of Megatron's with its .bin and .idx, a file or a folder of texts, a folder with a
tokenizer.json.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings, plain_text
from shardwright.interchange.reading.shell_marks import UNKNOWN

_PREFIXES = ("data-path", "train-data-path", "model.data.data_prefix", "model.data.data_prefix.train")
_TEXTS = ("training.dataset_path", "--train_file", "--dataset_name", "training.dataset")
_TOKENIZERS = (
    "tokenizer-model",
    "tokenizer-name-or-path",
    "model.tokenizer.model",
    "model.tokenizer.type",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "--tokenizer_name",
    "--model_name_or_path",
)
_MOST_SOURCES = 1000


@dataclass(frozen=True)
class CarriedData:
    """Fields of [data] with absolute paths, and remarks: what is not carried over, and why."""

    fields: Flat
    remarks: tuple[str, ...] = ()


def carried_data(settings: Settings, folders: Sequence[Path], set_fields: Mapping[str, str]) -> CarriedData:
    """The fields of [data] that the settings give. Relative paths are tried in each of `folders`, in their order."""
    if any(name.startswith(("data.path", "data.sources")) for name in set_fields):
        return CarriedData({})
    name = next((name for name in (*_PREFIXES, *_TEXTS) if settings.given.get(name) not in (None, [], "", True)), "")
    if not name:
        return CarriedData({})
    pairs = _sources(settings.given[name])
    if pairs is None:
        return CarriedData({}, (_not_carried(settings, name, say("these are no pairs of a weight and a path")),))
    weighted = [(weight, _existing_path(text, folders, is_prefix=name in _PREFIXES)) for weight, text in pairs]
    missing = [text for (_, text), (_, path) in zip(pairs, weighted, strict=True) if path is None]
    if missing:
        unknown = any(UNKNOWN.search(text) for text in missing)
        path_text = shortened(missing[0])
        why = say("nobody has set that") if unknown else say("{path} is not on this machine", path=path_text)
        return CarriedData({}, (_not_carried(settings, name, why),))
    settings.ignore(name)
    sources = [{"path": str(path), "weight": weight} for weight, path in weighted]
    fields: Flat = {"path": sources[0]["path"]} if len(sources) == 1 else {"sources": sources}
    tokenizer = _tokenizer(settings, folders)
    return replace(tokenizer, fields=fields | tokenizer.fields)


def with_paths_from(job: JobSpec, folder: Path) -> JobSpec:
    """The job with the absolute paths of its data made relative to a folder."""

    def relative(path: str) -> str:
        return os.path.relpath(path, folder.absolute()) if os.path.isabs(path) else path

    data = job.data
    sources = [source.model_copy(update={"path": relative(source.path)}) for source in data.sources]
    update = {"path": relative(data.path), "tokenizer": relative(data.tokenizer), "sources": sources}
    changed = {name: value for name, value in update.items() if value != getattr(data, name)}
    return job.model_copy(update={"data": data.model_copy(update=changed)}) if changed else job


def _not_carried(settings: Settings, name: str, why: str) -> str:
    setting = settings.setting_text(name)
    return say("the data is not carried: {setting}: {why} (--set data.path=PATH)", setting=setting, why=why)


def _sources(value: Any) -> list[tuple[float, str]] | None:
    """Pairs of weight and path: a single path, or a list with a weight before each path. None if it is neither."""
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if len(words) == 1:
        return [(1.0, words[0])]
    try:
        pairs = [(float(weight), path) for weight, path in zip(words[::2], words[1::2], strict=True)]
    except ValueError:
        return None
    return pairs if len(pairs) <= _MOST_SOURCES and all(0 < weight < float("inf") for weight, _ in pairs) else None


def _existing_path(text: str, folders: Sequence[Path], is_prefix: bool) -> Path | None:
    """The absolute path of a file, a folder, or a prefix of token files; None if it is not on this machine."""
    if not text or "\0" in text or len(text) > 4096 or UNKNOWN.search(text):
        return None
    for folder in folders:
        path = Path(os.path.abspath(folder / os.path.expanduser(text)))
        suffixes = (".bin", ".idx") if is_prefix else ("",)
        if all(os.path.isfile(f"{path}{suffix}") or (not suffix and os.path.isdir(path)) for suffix in suffixes):
            return path
    return None


def _tokenizer(settings: Settings, folders: Sequence[Path]) -> CarriedData:
    """The field for the tokenizer.json that settings name, or for a folder with one."""
    name = next((name for name in _TOKENIZERS if settings.given.get(name) not in (None, "", True)), "")
    if not name:
        remark = say("the tokenizer is not carried: nothing names one (--set data.tokenizer=PATH)")
        return CarriedData({}, (remark,))
    path = _existing_path(plain_text(settings.given[name]), folders, is_prefix=False)
    if path is not None and (path.suffix == ".json" or (path / "tokenizer.json").is_file()):
        settings.ignore(name)
        return CarriedData({"tokenizer": str(path)})
    remark = say(
        "the tokenizer is not carried: {setting} is no tokenizer.json of this machine, nor a folder with one (--set "
        "data.tokenizer=PATH)",
        setting=settings.setting_text(name),
    )
    return CarriedData({}, (remark,))
