"""Usual layouts of data folders: which files hold rows, and to which split they belong.

A data set of the Hugging Face hub is a folder of parquet or JSONL files named after splits, beside a README. A data set
saved by `datasets` is a folder of Arrow files that its state.json names, or one such folder for each split. Only files
on this machine are read.
"""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from shardwright.config.base import error_text
from shardwright.config.data import DataSpec
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text
from shardwright.train.data.packed_files import begins_with_rows

ALL = "all"
_ROWS = re.compile(r"\.(parquet|arrow|(jsonl|ndjson|json)\.(gz|bz2|xz|zst)|jsonl|ndjson)$", re.IGNORECASE)
# Files that lie beside the rows and describe them.
_DESCRIPTION = re.compile(
    r"^(readme|license|licence|changelog|citation)(\.\w+)?$|^(dataset_infos?|dataset_dict|state)\.json$|\.idx$",
    re.IGNORECASE,
)
_SHARD = re.compile(r"^(.+?)-\d{5}-of-\d{5}$")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, split_words in _SPLIT_WORDS.items() for word in split_words}
_MOST_LOOKED_AT = 20  # how many .json files beside text are opened, for a note
_STATE, _MOST_BYTES = "state.json", 16 * MIB


def json_rows(paths: Sequence[Path], data: DataSpec, notes: list[str]) -> frozenset[Path]:
    """The .json files whose beginnings show rows. Beside files of text, such as the sources of a program, they are read
    as text, unless data.chats is set; a note tells so."""
    json_paths = [path for path in paths if path.suffix.lower() == ".json" and not _DESCRIPTION.search(path.name)]
    if data.format != "auto" or not json_paths:
        return frozenset()
    texts = [path for path in paths if path.suffix.lower() != ".json" and not _is_known_by_name(path)]
    if not texts or data.chats:
        return frozenset(path for path in json_paths if begins_with_rows(path))
    if example := next((path for path in json_paths[:_MOST_LOOKED_AT] if begins_with_rows(path)), None):
        notes.append(
            say(
                "{path}: {name} and other .json files are read as text, as {other} is; name the files of rows by a "
                "glob to read them as rows",
                path=data.path,
                name=example.name,
                other=texts[0].name,
            )
        )
    return frozenset()


def _is_known_by_name(path: Path) -> bool:
    return bool(_DESCRIPTION.search(path.name) or _ROWS.search(path.name))


def chosen_paths(
    root: Path,
    paths: Sequence[Path],
    data: DataSpec,
    faults: list[str],
    notes: list[str],
    in_json: Collection[Path] = (),
) -> list[Path]:
    """The files of a folder that are data, without descriptions and other splits. `in_json` are the .json files of
    rows. Raises OSError."""
    if data.format in ("text", "tokens"):
        return list(paths)
    saved = [path.parent for path in paths if path.name == _STATE]
    candidates = [path for path in paths if path.parent not in saved]
    for folder in saved:
        candidates += _saved_files(folder, paths, faults)
    rows = [path for path in candidates if _ROWS.search(path.name) or path in in_json]
    if not rows:
        return candidates
    candidates = sorted(path for path in candidates if not _DESCRIPTION.search(path.name))
    return _in_split(root, candidates, data, faults, notes)


def _saved_files(folder: Path, paths: Sequence[Path], faults: list[str]) -> list[Path]:
    """The files of a data set that `datasets` saved in a folder: those that its state.json names, without caches."""
    in_folder = [path for path in paths if path.parent == folder]
    if not any(path.suffix == ".arrow" for path in in_folder):
        return in_folder
    state = folder / _STATE
    way_out = say("save the data set again, or name its files by a glob")
    try:
        fields = json.loads(read_text(state, _MOST_BYTES, "state.json"))
        names = [file["filename"] for file in fields["_data_files"]]
        if fields.get("_indices_data_files"):
            faults.append(
                say(
                    "{state} names indices, which say which rows count; call flatten_indices() before saving",
                    state=state,
                )
            )
    except (FileFault, ValueError, TypeError, KeyError, RecursionError) as error:
        faults.append(
            say(
                "{state} does not say which files the data are: {kind} {reason}; {way_out}",
                state=state,
                kind=type(error).__name__,
                reason=error_text(error),
                way_out=way_out,
            )
        )
        return []
    by_name = {path.name: path for path in in_folder}
    if missing := [str(name) for name in names if not isinstance(name, str) or name not in by_name]:
        faults.append(
            say(
                "{state} names {missing}, which is not in {folder}; {way_out}",
                state=state,
                missing=repr(missing[0][:100]),
                folder=folder,
                way_out=way_out,
            )
        )
        return []
    return [by_name[name] for name in names]


def _in_split(root: Path, paths: Sequence[Path], data: DataSpec, faults: list[str], notes: list[str]) -> list[Path]:
    """The files of data.split, or all files if their names tell no splits."""
    splits = {path: split_of(path.relative_to(root)) for path in paths}
    split_names = sorted({split for split in splits.values() if split})
    if data.split == ALL or not split_names:
        return list(paths)
    wanted_split = _SPLIT_OF.get(data.split, data.split)
    # Files without a split count as training data.
    chosen = [
        path for path, split in splits.items() if split == wanted_split or (not split and wanted_split == "train")
    ]
    if not chosen:
        faults.append(
            say(
                'data.path {path} has files of the splits {split_names} and none of data.split "{split}"; set '
                'data.split to one of these, or to "{all}"',
                path=data.path,
                split_names=tuple(split_names),
                split=data.split,
                all=ALL,
            )
        )
    elif other_splits := [split for split in split_names if split != wanted_split]:
        notes.append(
            say(
                "{path}: split {wanted_split} alone is read ({count} of {total} files), and not {other_splits}; "
                'data.split = "{all}" reads every file',
                path=data.path,
                wanted_split=wanted_split,
                count=len(chosen),
                total=len(paths),
                other_splits=tuple(other_splits),
                all=ALL,
            )
        )
    return chosen


def split_of(name: Path) -> str:
    """The split of a file, from its path within the folder; "" if it tells none.

    "data/train_sft-00000-of-00003.parquet" is in train_sft, "en/valid.jsonl.gz" and
    "validation/data-00000-of-00001.arrow" are in validation.
    """
    stem = name.name.split(".")[0]
    shard = _SHARD.match(stem)
    if shard and shard[1] != "data":
        return _SPLIT_OF.get(shard[1], shard[1])
    for part in (stem, *reversed(name.parts[:-1])):
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in _SPLIT_OF:
                return _SPLIT_OF[word]
    return ""
