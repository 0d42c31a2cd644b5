"""The files of the data. Faults are appended to a list instead of being raised, so that the caller can report all at
once."""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from shardwright.config.base import error_text
from shardwright.config.data import STDLIB, DataSpec
from shardwright.config.phrase import say
from shardwright.config.user_file import kind_of, system_reason
from shardwright.train.data.file_search import list_paths, unreadable
from shardwright.train.data.folder_layout import chosen_paths, json_rows

# Enough to train a small model on a laptop, and read in a second.
_STDLIB_MOST_BYTES = 8_000_000
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
    ".npy": "tokens",
}
_TABLES = (".csv", ".tsv")
# Compressed files of rows, with JSON on each line.
_PACKED_ROWS = re.compile(r"\.(jsonl|ndjson|json)\.(gz|bz2|xz|zst)$", re.IGNORECASE)
# Reading stops after this number of faults: a wrong text_field is a fault in every line.
MOST_FAULTS = 10
# Formats whose files hold token ids, and are used in place.
IN_PLACE = ("tokens", "megatron")


@dataclass(frozen=True)
class SourceFile:
    """A file of the data set. `name` is its path within data.path, the same on every machine. `index_status` holds
    the size and the modification time of a Megatron index that belongs to it."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int
    format: str
    index_status: tuple[int, ...] = ()


def find_files(data: DataSpec, faults: list[str], notes: list[str] | None = None) -> list[SourceFile]:
    """The files that data.path names, in a fixed order. Faults are appended to `faults`, and notes on files left out to
    `notes`.

    A folder is searched recursively, also through links to folders. Names that begin with a dot are skipped, in a glob
    too. "python-stdlib" is the .py files of this Python's standard library, without its tests, generated build settings
    and old editor; at most 8 MB of them, picked by a hash of the names.
    """
    notes = [] if notes is None else notes
    try:
        root, paths = list_paths(_with_ending(data), faults)
        in_json = json_rows(paths, data, notes)
        if root == Path(os.path.expanduser(data.path)):  # a folder; a glob means the files that it matches
            paths = chosen_paths(root, paths, data, faults, notes, in_json)
        ids = {path for path in paths if path.suffix == ".bin"}
        paths = [path for path in paths if not (path.suffix == ".idx" and path.with_suffix(".bin") in ids)]
    except (OSError, ValueError) as error:
        reason = system_reason(error) if isinstance(error, OSError) else error_text(error)
        faults.append(
            say(
                "data.path {path} can't be read: {reason}; check the path and its permissions",
                path=repr(data.path),
                reason=reason,
            )
        )
        return []
    files = _described(root, paths, data, faults, in_json)
    if data.format == "auto" and (tables := [file for file in files if file.path.suffix.lower() in _TABLES]):
        _report_tables(tables, is_all=len(tables) == len(files), data=data, faults=faults, notes=notes)
    if not files and not faults:
        faults.append(
            say(
                "data.path {path} has no files of data, only what describes them; name a folder with some",
                path=data.path,
            )
        )
    if data.path == STDLIB:
        files = _pick(files, _STDLIB_MOST_BYTES)
    if files and not any(file.size_bytes for file in files):
        problem = (
            say("{path} is empty", path=data.path)
            if len(files) == 1
            else say("all {count} files of {path} are empty", count=len(files), path=data.path)
        )
        faults.append(
            say(
                "{problem} (0 bytes); name files with text in them, or data.path = {stdlib}",
                problem=problem,
                stdlib=repr(STDLIB),
            )
        )
        return []
    return files


def trained_on_notes(data: DataSpec) -> list[str]:
    """A line for each set of data.validation with files that are also trained on: its loss is not of unseen text."""
    sources = data.each if data.validation else ()
    trained = {file.path.resolve() for source in sources for file in find_files(source, [])}
    lines: list[str] = []
    for validation_set, spec in zip(data.validation, data.each_validation, strict=True):
        shared = [str(file.path) for file in find_files(spec, []) if file.path.resolve() in trained]
        if shared:
            files = shared[0]
            if len(shared) > 1:
                files = say("{file} and {more} more", file=shared[0], more=len(shared) - 1)
            lines.append(
                say(
                    "note: {files} of the set {name} is trained on, too: its loss is not of unseen text",
                    files=files,
                    name=validation_set.name,
                )
            )
    return lines


def _report_tables(
    tables: list[SourceFile], *, is_all: bool, data: DataSpec, faults: list[str], notes: list[str]
) -> None:
    """Add a fault if all files are tables, which would be read as raw text, or a note if they lie beside other text."""
    if is_all:
        faults.append(
            say(
                "data.path {path}: {name} is a table whose rows are not read here; write it as JSONL or parquet with "
                "a column of text (pandas: to_json(orient='records', lines=True)), or read all of it as raw text "
                'with data.format = "text"',
                path=data.path,
                name=tables[0].name,
            )
        )
    else:
        notes.append(
            say(
                "{path}: tables such as {name} are read as raw text, as the files beside them are",
                path=data.path,
                name=tables[0].name,
            )
        )


def index_of(path: Path) -> Path:
    """The path of a Megatron data set's index, from the path of its token ids."""
    return path.with_suffix(".idx")


def _with_ending(data: DataSpec) -> str:
    """data.path, with ".bin" added if it is the prefix of a Megatron data set."""
    plain = os.path.expanduser(data.path)
    if data.format in ("auto", "megatron") and "\0" not in plain and not os.path.exists(plain):
        return data.path + ".bin" if os.path.exists(plain + ".bin") and os.path.exists(plain + ".idx") else data.path
    if plain.endswith(".idx") and os.path.exists(plain[: -len(".idx")] + ".bin"):
        return data.path[: -len(".idx")] + ".bin"
    return data.path


def _described(
    root: Path, paths: Iterable[Path], data: DataSpec, faults: list[str], in_json: Collection[Path]
) -> list[SourceFile]:
    files: list[SourceFile] = []
    for path in paths:
        if len(faults) >= MOST_FAULTS:
            faults.append(say("no more files were looked at; there may be more faults behind them"))
            return []
        try:
            status = path.stat()
            detected = "jsonl" if path in in_json else _format_of(path)
            format_ = detected if data.format == "auto" else data.format
            index_status: tuple[int, ...] = ()
            if format_ == "megatron":
                index = index_of(path).stat()
                index_status = (index.st_size, index.st_mtime_ns)
        except OSError as error:
            faults.append(unreadable(Path(error.filename or path), error))
            continue
        if kind := kind_of(status.st_mode):
            faults.append(
                say(
                    "{path} is not a regular file but {kind}; copy its contents to one, or leave it out",
                    path=path,
                    kind=kind,
                )
            )
            continue
        name = path.relative_to(root).as_posix()
        files.append(
            SourceFile(path.absolute(), name, status.st_size, status.st_mtime_ns, format_, index_status=index_status)
        )
    return files


def _format_of(path: Path) -> str:
    """The format of a file by its suffix."""
    if _PACKED_ROWS.search(path.name):
        return "jsonl"
    by_suffix = _FORMATS.get(path.suffix.lower(), "text")
    return "megatron" if path.suffix == ".bin" and index_of(path).is_file() else by_suffix


def _pick(files: list[SourceFile], most_bytes: int) -> list[SourceFile]:
    """A part of the files, of at most `most_bytes` together, spread evenly over the names, in their order."""
    picked, total_bytes = set(), 0
    for file in sorted(files, key=lambda file: blake2b(file.name.encode()).digest()):
        if total_bytes + file.size_bytes <= most_bytes:
            picked.add(file.name)
            total_bytes += file.size_bytes
    return [file for file in files if file.name in picked]
