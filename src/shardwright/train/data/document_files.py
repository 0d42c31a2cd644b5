"""Which files the data are, and the documents in them.

A fault is not raised where it is met but appended to a list, so that the caller can report all at once.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shardwright.config.data import STDLIB, DataSpec
from shardwright.config.units import GIB, MIB
from shardwright.config.user_file import FileFault, kind_of, open_file
from shardwright.train.data.file_search import list_paths, unreadable

# Enough for a model that learns on a laptop, and read in a second.
_STDLIB_MOST_BYTES = 8_000_000
_FORMATS = {".jsonl": "jsonl", ".parquet": "parquet", ".bin": "tokens", ".npy": "tokens"}
_PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"}
# Text is read and tokenized in pieces of about this size, so that memory doesn't grow with a document.
_PIECE_BYTES = 1 << 20
# A wrong text_field is a fault in every line; nobody reads a million of them.
_MOST_FAULTS = 10
# One record, and one group of rows of a parquet file, must fit into memory several times.
_LONGEST_LINE_BYTES = 16 * MIB
_LARGEST_GROUP_BYTES = 4 * GIB


@dataclass(frozen=True)
class SourceFile:
    """A file of the data set. `name` is its path within data.path, the same on every machine."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int
    format: str


@dataclass(frozen=True)
class Document:
    """One document: `name` says where in the data it is; `pieces` are its text, to be read once."""

    name: str
    pieces: Iterable[str]


def find_files(data: DataSpec, faults: list[str]) -> list[SourceFile]:
    """The files that data.path means, in a sorted order; what is wrong goes to `faults`.

    A folder is searched recursively, links to folders included; names that begin with a dot are skipped,
    in a glob too. "python-stdlib" is the .py files of this Python's standard library without its tests,
    generated build settings and retired editor; of more than 8 MB, a part picked by a hash of the names.
    """
    try:
        root, paths = list_paths(data.path, faults)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        faults.append(f"data.path {data.path!r} can't be read: {reason}; check the path and its permissions")
        return []
    files: list[SourceFile] = []
    for path in paths:
        if len(faults) >= _MOST_FAULTS:
            faults.append("no more files were looked at; there may be more faults behind them")
            return []
        try:
            status = path.stat()
        except OSError as error:
            faults.append(unreadable(path, error))
            continue
        if kind := kind_of(status.st_mode):
            faults.append(f"{path} is not a regular file but {kind}; copy its contents to one, or leave it out")
            continue
        format_ = _FORMATS.get(path.suffix.lower(), "text") if data.format == "auto" else data.format
        name = path.relative_to(root).as_posix()
        files.append(SourceFile(path.absolute(), name, status.st_size, status.st_mtime_ns, format=format_))
    if data.path == STDLIB:
        files = _pick(files, _STDLIB_MOST_BYTES)
    if files and not any(file.size_bytes for file in files):
        what = f"{data.path} is empty" if len(files) == 1 else f"all {len(files)} files of {data.path} are empty"
        faults.append(f"{what} (0 bytes); name files with text in them, or data.path = {STDLIB!r}")
        return []
    return files


def read_documents(files: Sequence[SourceFile], text_field: str, faults: list[str]) -> Iterator[Document]:
    """The documents of `files` in their order; what is wrong goes to `faults`, and reading goes on.

    The pieces of a document must be read before the next document is asked for.
    """
    for file in files:
        yield from _READERS[file.format](file, text_field, faults)
        if len(faults) >= _MOST_FAULTS:
            faults.append(f"reading stopped after {len(faults)} faults; there may be more behind them")
            return


def _pick(files: list[SourceFile], most_bytes: int) -> list[SourceFile]:
    """Files of at most `most_bytes` in all, spread evenly over the names, in their order."""
    picked, total_bytes = set(), 0
    for file in sorted(files, key=lambda file: blake2b(file.name.encode()).digest()):
        if total_bytes + file.size_bytes <= most_bytes:
            picked.add(file.name)
            total_bytes += file.size_bytes
    return [file for file in files if file.name in picked]


class _FaultError(Exception):
    """What ends the reading of one file; the message is the fault."""


@contextmanager
def _collect(file: SourceFile, faults: list[str]) -> Iterator[None]:
    """Turn what ends the reading of `file` into a fault."""
    try:
        yield
    except (_FaultError, FileFault) as fault:
        faults.append(str(fault))
    except OSError as error:
        faults.append(unreadable(file.path, error))


def _decode(raw: bytes, file: SourceFile, position: int) -> str:
    """The text of `raw`, which begins at byte `position` of the file. Raises _FaultError if it is binary."""
    way_out = "unpack it first" if file.path.suffix.lower() in _PACKED else "save it as UTF-8"
    way_out += ", set data.format to what it is, or leave it out of data.path"
    if (nul := raw.find(b"\0")) >= 0:
        raise _FaultError(f"{file.path} is not text: byte {position + nul} is NUL; {way_out}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {position + error.start} (0x{raw[error.start]:02x})"
        raise _FaultError(f"{file.path} is not UTF-8 text: {error.reason} at {byte}; {way_out}") from None


def _read_text(file: SourceFile, text_field: str, faults: list[str]) -> Iterator[Document]:
    """The file as one document."""
    yield Document(file.name, _text_pieces(file, faults))


def _text_pieces(file: SourceFile, faults: list[str]) -> Iterator[str]:
    with _collect(file, faults), open_file(file.path) as stream:
        rest, position = b"", 0
        while block := stream.read(_PIECE_BYTES):
            raw = rest + block
            if position == 0 and raw.startswith(b"\xef\xbb\xbf"):  # a byte order mark is not text
                raw, position = raw[3:], 3
            # Cut behind the last line; in a line longer than a piece, in front of a character.
            cut = raw.rfind(b"\n") + 1
            if not cut:
                last = range(len(raw) - 1, max(len(raw) - 5, -1), -1)  # a character has up to 4 bytes
                cut = next((i for i in last if raw[i] & 0xC0 != 0x80), len(raw))
            if text := _decode(raw[:cut], file, position):
                yield text
            rest, position = raw[cut:], position + cut
        if rest:
            yield _decode(rest, file, position)


def _read_jsonl(file: SourceFile, text_field: str, faults: list[str]) -> Iterator[Document]:
    """A document a line; blank lines are skipped."""
    with _collect(file, faults), open_file(file.path) as stream:
        position = 0
        for number, raw in enumerate(iter(lambda: stream.readline(_LONGEST_LINE_BYTES + 1), b""), 1):
            if len(raw) > _LONGEST_LINE_BYTES:
                raise _FaultError(
                    f"{file.path}, line {number} is longer than {_LONGEST_LINE_BYTES:,} bytes; write one record a "
                    "line, and cut longer documents"
                )
            text = _decode(raw, file, position).removeprefix("\ufeff" if number == 1 else "")
            position += len(raw)
            if not text.strip():
                continue
            where = f"{file.path}, line {number}"
            try:
                value = _field(json.loads(text.rstrip("\r\n")), text_field, where)
            except json.JSONDecodeError as error:  # its own words name a line, too: always the first
                faults.append(f"{where} is not JSON: {error.msg} at character {error.pos}; mend that line, or drop it")
            except (ValueError, RecursionError) as error:
                faults.append(f"{where} is not JSON: {error}; mend that line, or drop it")
            except _FaultError as fault:
                faults.append(str(fault))
            else:
                yield Document(f"{file.name}:{number}", _cut(value))
            if len(faults) >= _MOST_FAULTS:
                return


def _field(record: object, text_field: str, where: str) -> str:
    """The text of one JSON record. Raises _FaultError."""
    if not isinstance(record, dict):
        kind = f"of type {type(record).__name__}"
        raise _FaultError(f'{where} is {kind}; each line must be an object such as {{"{text_field}": "..."}}')
    if text_field not in record:
        raise _FaultError(f"{where} has no field {text_field!r}; {_one_of(list(record))}")
    return _valid(record[text_field], text_field, where)


def _one_of(names: list[str], most: int = 12) -> str:
    present = ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"it has {present}: set data.text_field to one of them" if names else "it has none at all"


def _valid(value: object, text_field: str, where: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        way_out = "set data.text_field to a field of text, or drop that record"
        raise _FaultError(f"{where}: field {text_field!r} is {kind}, not a string; {way_out}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"half a surrogate pair ({value[error.start]!r}) at character {error.start}"
        raise _FaultError(f"{where}: field {text_field!r} has {what}; mend that record, or drop it") from None
    return value


def _read_parquet(file: SourceFile, text_field: str, faults: list[str]) -> Iterator[Document]:
    """A document a row, a bounded number of rows in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _collect(file, faults), open_file(file.path) as stream:
        try:
            with pq.ParquetFile(stream) as table:
                columns = table.schema_arrow.names
                if text_field not in columns:
                    raise _FaultError(f"{file.path} has no column {text_field!r}; {_one_of(columns)}")
                metadata = table.metadata
                _check_groups(metadata, file)
            # Values that repeat stay references to a dictionary: written out, a small file could fill the memory.
            with pq.ParquetFile(stream, metadata=metadata, read_dictionary=[text_field]) as table:
                row = 0
                for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                    for scalar in batch.column(0):
                        value = scalar.as_py()
                        row += 1
                        where = f"{file.path}, row {row}"
                        try:
                            yield Document(f"{file.name}:{row}", _cut(_valid(value, text_field, where)))
                        except _FaultError as fault:
                            faults.append(str(fault))
                            if len(faults) >= _MOST_FAULTS:
                                return
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # the system's; without a number it is the library's
                raise
            reason = str(error).splitlines()[0]
            way_out = "write it again, or leave it out of data.path"
            raise _FaultError(f"{file.path} is a broken parquet file: {reason}; {way_out}") from None


def _check_groups(metadata: Any, file: SourceFile) -> None:
    """Raises _FaultError for a group of rows that would fill the memory."""
    for number in range(metadata.num_row_groups):
        if (size := metadata.row_group(number).total_byte_size) > _LARGEST_GROUP_BYTES:
            raise _FaultError(
                f"{file.path}: row group {number} has {size:,} bytes, and at most {_LARGEST_GROUP_BYTES:,} are read at "
                "once; write it again with smaller row groups (row_group_size of pyarrow's write_table)"
            )


def _cut(text: str) -> list[str]:
    """`text` in pieces of at most _PIECE_BYTES characters, cut behind a newline where there is one."""
    pieces, start = [], 0
    while start < len(text):
        stop = start + _PIECE_BYTES
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        pieces.append(text[start:stop])
        start = stop
    return pieces


_READERS: dict[str, Callable[[SourceFile, str, list[str]], Iterator[Document]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
