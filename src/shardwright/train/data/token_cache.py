"""The cache of token files: text is tokenized once, and stored under a key made from the text files and the settings.

Beside each token file lies a file of its document starts. A JSON summary of all of them is written last: if it exists,
the others exist, too.
"""

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.phrase import say
from shardwright.config.units import KIB
from shardwright.config.user_file import read_file, system_reason
from shardwright.train.data.cache_lock import alone
from shardwright.train.data.document_files import Document, read_documents
from shardwright.train.data.encoding import id_dtype
from shardwright.train.data.encoding_pool import encoders
from shardwright.train.data.encoding_process import EncodingSetup
from shardwright.train.data.progress import Progress, Tell
from shardwright.train.data.source_files import IN_PLACE, SourceFile
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.token_stream import TokenSpan
from shardwright.train.data.token_writer import TokenWriter
from shardwright.train.data.tokenizer import Tokenizer
from shardwright.train.launch.full_disk import is_full, telling_of_full_disk

# Part of every cache key: raise it whenever the contents of the files change.
_CACHE_VERSION = 4
# Opens a file that will appear under the given path once it is complete.
_Create = Callable[[Path], BinaryIO]
SIDES = ("train", "validation")
_MOST_SUMMARY_BYTES = 64 * KIB
# A temporary file that has not changed for so long is not being written any more.
_OLD_S = 3600.0
# The training side and the held-out side, each read as one stream.
Sides = tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...]]


@dataclass(frozen=True)
class Summary:
    """The JSON file beside the token files. `unigram_entropy` is in nats per token; `dropped_share` is the share of
    characters without a token; `num_lost` counts answers without a loss."""

    dtype: str
    num_documents: int
    num_train_tokens: int
    num_held_out_tokens: int
    largest_id: int
    unigram_entropy: float
    dropped_share: float = 0.0
    has_answers: bool = False
    num_answers: int = 0
    num_lost: int = 0


@dataclass(frozen=True)
class Cache:
    """An entry of the cache: its folder, its key, and the function that reports progress."""

    folder: Path
    key: str
    tell: Tell


def cache_key(
    files: list[SourceFile], data: DataSpec, tokenizer: Tokenizer, template: TemplateFiles | None, dtypes: list[str]
) -> str:
    """The cache key: a hash of the files (path, size, time, format) and of the settings that decide their tokens.
    `dtypes` are the types of token files."""
    # Neither sequence nor vocab is part of it: they decide if the tokens are usable, not which tokens there are.
    if files[0].format in IN_PLACE:
        settings: list[int | float | str] = [_CACHE_VERSION, *dtypes, data.end_of_document]
    else:
        settings = [_CACHE_VERSION, data.text_field, tokenizer.fingerprint, data.validation_share]
        settings += ["chats", template.fingerprint if template else ""] if data.chats else []
        settings += ["today", data.today] if data.chats and data.today else []
    described = [
        [os.fspath(file.path), file.name, file.size_bytes, file.mtime_ns, file.format, *file.index_status]
        for file in files
    ]
    # A file name that is not UTF-8 comes as surrogates, which json escapes.
    return "tokens-" + blake2b(json.dumps([settings, described]).encode(), digest_size=16).hexdigest()


def tokenize(files: list[SourceFile], setup: EncodingSetup, tokenizer: Tokenizer, cache: Cache) -> Summary:
    """Write the token files of a cache entry, unless they exist or another process makes them meanwhile. Raises
    PlanError."""
    folder, key, tell = cache.folder, cache.key, cache.tell
    if summary := _cached_summary(cache):
        return summary
    with alone(folder / f".{key}.lock", lambda: _cached_summary(cache) is not None, tell) as tell_others:
        if tell_others is None and (summary := _cached_summary(cache)):
            return summary
        _remove_old(folder, key)
        progress = Progress(files, setup.data.path, tell, tell_others or tell)
        return _make(files, setup, tokenizer, cache, progress)


def _remove_old(folder: Path, key: str) -> None:
    """Remove old temporary files of this key, which a killed process left."""
    for path in folder.glob(f".{key}.*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_S:
                path.unlink()


def _cached_summary(cache: Cache) -> Summary | None:
    """The summary of a cache entry, if the entry is complete; else None."""
    summary = read_summary(cache.folder / f"{cache.key}.json")
    return summary if summary and _is_whole(cached_spans(summary, cache.folder, cache.key)) else None


def _make(
    files: list[SourceFile], setup: EncodingSetup, tokenizer: Tokenizer, cache: Cache, progress: Progress
) -> Summary:
    folder, key, data = cache.folder, cache.key, setup.data
    faults: list[str] = []
    num_bytes = sum(file.size_bytes for file in files)
    with _writing(folder) as create, encoders(setup, tokenizer, num_bytes) as encoding:
        outputs = [create(folder / f"{key}.{side}.bin") for side in SIDES]
        starts = [create(folder / f"{key}.{side}.starts.bin") for side in SIDES]
        answers = [create(folder / f"{key}.{side}.answers.bin") for side in SIDES] if data.chats else []
        writer = TokenWriter(tokenizer, encoding, outputs, starts, answers=answers, progress=progress)
        for document in read_documents(files, data, faults, progress.place):
            _write_document(writer, document, data.validation_share)
            if faults:  # the output will be discarded; read on to collect the other faults
                writer.drop()
        if faults:
            raise PlanError("data", faults)
        writer.flush()
        if fault := writer.dropped.fault(data.tokenizer):
            raise PlanError("data", [fault])
        numbers = (writer.num_tokens[0], writer.num_tokens[1])
        summary = make_summary(id_dtype(tokenizer).str, writer.num_documents, numbers, writer.counts)
        summary = replace(
            summary,
            dropped_share=writer.dropped.share,
            has_answers=data.chats,
            num_answers=writer.num_answers,
            num_lost=writer.num_lost,
        )
        _write_summary(create, folder / f"{key}.json", summary)
    return summary


def cached_spans(summary: Summary, folder: Path, key: str) -> Sides:
    """The spans of the cached token files, training and held out. An empty file gives no span."""
    root = folder.absolute()

    def span(side: str, number: int) -> tuple[TokenSpan, ...]:
        starts = root / f"{key}.{side}.starts.bin"
        answers = root / f"{key}.{side}.answers.bin" if summary.has_answers else None
        path = root / f"{key}.{side}.bin"
        return (TokenSpan(path, summary.dtype, 0, number, starts=starts, answers=answers),) if number else ()

    return span(SIDES[0], summary.num_train_tokens), span(SIDES[1], summary.num_held_out_tokens)


# A document's side of the split is decided by its name and its first _HASHED_CHARACTERS characters.
_HASHED_CHARACTERS = 1024


def _write_document(writer: TokenWriter, document: Document, validation_share: float) -> None:
    def side_of(text: str) -> int:
        start = f"{document.name}\0{text[:_HASHED_CHARACTERS]}".encode(errors="surrogateescape")
        number = int.from_bytes(blake2b(start, digest_size=8).digest(), "big")
        return int(number / 2**64 < validation_share)

    if document.chat is not None:
        writer.add_chat(side_of(document.chat.beginning), document.chat)
        return
    side = -1
    for piece in document.pieces:
        side = side_of(piece) if side < 0 else side
        writer.add(side, piece)
    if side >= 0:  # an empty document is not counted
        writer.end_document(side)


def make_summary(dtype: str, num_documents: int, numbers: tuple[int, int], counts: NDArray[np.int64]) -> Summary:
    """Make a summary. `numbers` are the numbers of training and held-out tokens; `counts` tells how often each id
    occurs: [vocab]."""
    occurring = counts[counts > 0] / max(int(counts.sum()), 1)
    entropy = math.fsum(-occurring * np.log(occurring))
    largest_id = int(np.flatnonzero(counts)[-1]) if occurring.size else 0
    return Summary(dtype, num_documents, *numbers, largest_id, entropy)


def read_summary(path: Path) -> Summary | None:
    """Read a summary. None if there is no file, or none that this version can read; then the tokens are made again."""
    try:
        summary = Summary(**json.loads(read_file(path, _MOST_SUMMARY_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return (
        summary
        if all(_is_as_described(field.type, getattr(summary, field.name)) for field in fields(Summary))
        else None
    )


def _is_as_described(kind: object, value: object) -> bool:
    """True if a value of a summary fits its field's type `kind`: a str names a number type, and numbers are >= 0."""
    if kind is str:
        return isinstance(value, str) and re.fullmatch(r"[<>|=]?[iu][1248]", value) is not None
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    is_number = isinstance(value, int | float if kind is float else int)
    return is_number and isinstance(value, int | float) and 0 <= value < 2**63


def save_summary(path: Path, summary: Summary, starts: Mapping[Path, NDArray[np.int64]]) -> None:
    """Write the summary of token files that lie outside the cache, and their files of document starts: `starts` holds
    the contents by path. Raises PlanError."""
    with _writing(path.parent) as create:
        for starts_path, numbers in starts.items():
            create(starts_path).write(numbers.astype("<i8").tobytes())
        _write_summary(create, path, summary)


def _is_whole(sides: Sides) -> bool:
    """True if the cached files exist, with all their bytes."""
    try:
        return all(
            span.path.stat().st_size == span.num_tokens * np.dtype(span.dtype).itemsize
            and (span.starts is None or span.starts.stat().st_size > 0)
            and (span.answers is None or span.answers.exists())
            for spans in sides
            for span in spans
        )
    except OSError:
        return False


def _write_summary(create: _Create, path: Path, summary: Summary) -> None:
    create(path).write(json.dumps(asdict(summary), indent=1).encode())


@contextmanager
def _writing(folder: Path) -> Iterator[_Create]:
    """Write files atomically: they appear under their names, complete and on the disk, when the block ends without an
    exception.

    They appear in the order in which they were created. Raises PlanError if they can't be written, and DiskFullError
    if only the room is missing.
    """
    pending: list[tuple[BinaryIO, Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:

            def create(path: Path) -> BinaryIO:
                # Random, because process ids repeat on machines of a cluster that share a folder.
                temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
                file = stack.enter_context(temporary.open("xb"))
                pending.append((file, temporary, path))
                return file

            yield create
            for file, _, _ in pending:
                file.flush()
                os.fsync(file.fileno())
        for _, temporary, path in pending:
            temporary.replace(path)
        _sync_folder(folder)
    except OSError as error:
        with telling_of_full_disk(folder):
            if is_full(error):
                raise
        fault = say(
            "token files can't be written to {folder}: {reason}; make room there or name another run.folder",
            folder=folder,
            reason=system_reason(error),
        )
        raise PlanError("data", [fault]) from None
    finally:
        for _, temporary, _ in pending:
            with suppress(OSError):  # the file was renamed, or can't be removed either
                temporary.unlink()


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that a killed process left in a folder. No process may be writing there."""
    for path in folder.glob(".tokens-*.tmp"):
        with suppress(OSError):
            path.unlink()


def _sync_folder(folder: Path) -> None:
    """Sync a folder to the disk, so that renames in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
