"""Token files in a cache folder: text is tokenized once, and found again under a name that says from what and how.

Beside each token file lies one that says where its documents begin, and beside all of them a JSON file with their
numbers. It is written last: where it is, they are.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.train.data.document_files import Document, SourceFile, read_documents
from shardwright.train.data.token_stream import TokenSpan
from shardwright.train.data.tokenizer import Tokenizer
from shardwright.train.launch.full_disk import is_full, telling_of_full_disk

# Part of every cache name: a change of what is written under the same name must change it.
_CACHE_VERSION = 3
# Text that is tokenized at a time. A tokenizer needs some 50 bytes of memory for each character.
_BATCH_CHARACTERS = 4 << 20
# Of a document, what its side of the split is decided by, next to its name.
_HASHED_CHARACTERS = 1024
# Opens a file that will appear under the given path.
_Create = Callable[[Path], BinaryIO]
_SIDES = ("train", "validation")
# Train and held out, each to be read as one stream.
Sides = tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...]]


@dataclass(frozen=True)
class Summary:
    """The JSON file beside the token files: unigram_entropy in nats per token, dropped_share of characters."""

    dtype: str
    num_documents: int
    num_train_tokens: int
    num_held_out_tokens: int
    largest_id: int
    unigram_entropy: float
    dropped_share: float = 0.0


def cache_key(files: list[SourceFile], data: DataSpec, tokenizer: Tokenizer) -> str:
    """Names what would be written: the same for the same files read in the same way."""
    # Neither sequence nor vocab is in it: they decide if the tokens will do, not what they are.
    if files[0].format == "tokens":
        how: list[int | float | str] = [_CACHE_VERSION, data.token_dtype, data.end_of_document]
    else:
        how = [_CACHE_VERSION, data.text_field, tokenizer.fingerprint, data.validation_share]
    what = [[os.fspath(file.path), file.name, file.size_bytes, file.mtime_ns, file.format] for file in files]
    # A file name that is not UTF-8 comes as surrogates, which json escapes.
    return "tokens-" + blake2b(json.dumps([how, what]).encode(), digest_size=16).hexdigest()


def tokenize(files: list[SourceFile], data: DataSpec, tokenizer: Tokenizer, folder: Path, key: str) -> Summary:
    """Write the token files of `key`, unless they are there. Raises PlanError."""
    summary = read_summary(folder / f"{key}.json")
    if summary and _is_whole(cached_spans(summary, folder, key)):
        return summary
    faults: list[str] = []
    dtype = np.min_scalar_type(max(tokenizer.num_ids - 1, 0)).newbyteorder("<")
    with _writing(folder) as create:
        outputs = [create(folder / f"{key}.{side}.bin") for side in _SIDES]
        starts = [create(folder / f"{key}.{side}.starts.bin") for side in _SIDES]
        writer = _TokenWriter(tokenizer, dtype, outputs, starts)
        for document in read_documents(files, data.text_field, faults):
            _write_document(writer, document, data.validation_share)
            if faults:  # what is written will be thrown away; read on for the other faults
                writer.drop()
        if faults:
            raise PlanError("data", faults)
        writer.flush()
        if fault := tokenizer.dropped.fault(data.tokenizer):
            raise PlanError("data", [fault])
        numbers = (writer.num_tokens[0], writer.num_tokens[1])
        summary = make_summary(dtype.str, writer.num_documents, numbers, writer.counts)
        summary = replace(summary, dropped_share=tokenizer.dropped.share)
        _write_summary(create, folder / f"{key}.json", summary)
    return summary


def cached_spans(summary: Summary, folder: Path, key: str) -> Sides:
    """Where the token files of text are, train and held out; an empty one is no span."""
    root = folder.absolute()
    train, held_out = (
        (TokenSpan(root / f"{key}.{side}.bin", summary.dtype, 0, number, starts=root / f"{key}.{side}.starts.bin"),)
        if number
        else ()
        for side, number in zip(_SIDES, (summary.num_train_tokens, summary.num_held_out_tokens), strict=True)
    )
    return train, held_out


def make_summary(dtype: str, num_documents: int, numbers: tuple[int, int], counts: NDArray[np.int64]) -> Summary:
    """`numbers`: train and held-out tokens; `counts`: how often each id occurs, [vocab]."""
    occurring = counts[counts > 0] / max(int(counts.sum()), 1)
    entropy = math.fsum(-occurring * np.log(occurring))
    largest_id = int(np.flatnonzero(counts)[-1]) if occurring.size else 0
    return Summary(dtype, num_documents, *numbers, largest_id, entropy)


def read_summary(path: Path) -> Summary | None:
    """None if there is none, or none that this version can read: it is made anew."""
    try:
        return Summary(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def save_summary(path: Path, summary: Summary, starts: Mapping[Path, NDArray[np.int64]]) -> None:
    """For token files that lie elsewhere: write a summary, and where documents begin by the path of that file. Raises
    PlanError."""
    with _writing(path.parent) as create:
        for path_of_starts, numbers in starts.items():
            create(path_of_starts).write(numbers.astype("<i8").tobytes())
        _write_summary(create, path, summary)


def _write_document(writer: "_TokenWriter", document: Document, validation_share: float) -> None:
    side = -1
    for piece in document.pieces:
        if side < 0:
            start = f"{document.name}\0{piece[:_HASHED_CHARACTERS]}".encode(errors="surrogateescape")
            number = int.from_bytes(blake2b(start, digest_size=8).digest(), "big")
            side = int(number / 2**64 < validation_share)
        writer.add(side, piece)
    if side >= 0:  # an empty document is none
        writer.end_document(side)


class _TokenWriter:
    """Collects text, tokenizes it in batches, and appends the ids to the file of its side (0 or 1), and to that side's
    file of `starts` where its documents begin."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype, outputs: list[BinaryIO], starts: list[BinaryIO]) -> None:
        self.num_documents = 0
        self.num_tokens = [0, 0]
        self.counts = np.zeros(tokenizer.num_ids, np.int64)
        self._tokenizer = tokenizer
        self._end = np.array(tokenizer.end_of_text, np.int64)
        self._dtype = dtype
        self._outputs = outputs
        self._starts = starts
        self._begins = [True, True]  # whether the next token of a side is a document's first
        self.drop()

    def drop(self) -> None:
        """Forget the text that is not written yet."""
        self._texts: list[str] = []
        self._sides: list[int] = []  # for each text; and for each end of a document, with no text
        self._is_end: list[bool] = []
        self._num_characters = 0

    def add(self, side: int, text: str) -> None:
        self._texts.append(text)
        self._sides.append(side)
        self._is_end.append(False)
        self._num_characters += len(text)
        if self._num_characters >= _BATCH_CHARACTERS:
            self.flush()

    def end_document(self, side: int) -> None:
        self._sides.append(side)
        self._is_end.append(True)
        self.num_documents += 1

    def flush(self) -> None:
        """Write what is collected. Raises OSError, or PlanError if the tokenizer can't encode it."""
        try:
            encoded = iter(self._tokenizer.encode_batch(self._texts))
        except ValueError as error:
            way_out = 'use one with an "unknown" token, or data.tokenizer = "bytes"'
            fault = f"the tokenizer of data.tokenizer can't encode the text: {error}; {way_out}"
            raise PlanError("data", [fault]) from None
        ids_of: tuple[list[NDArray[np.int64]], ...] = ([], [])
        starts_of: tuple[list[int], ...] = ([], [])
        ends = list(self.num_tokens)
        for side, is_end in zip(self._sides, self._is_end, strict=True):
            ids = self._end if is_end else next(encoded)
            if self._begins[side] and len(ids):
                starts_of[side].append(ends[side])
                self._begins[side] = False
            self._begins[side] = self._begins[side] or is_end
            ids_of[side].append(ids)
            ends[side] += len(ids)
        for starts, file in zip(starts_of, self._starts, strict=True):
            file.write(np.array(starts, "<i8").tobytes())
        for side, parts in enumerate(ids_of):
            ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
            self._outputs[side].write(ids.astype(self._dtype).tobytes())
            self.num_tokens[side] += len(ids)
            self.counts += np.bincount(ids, minlength=len(self.counts))
        self.drop()


def _is_whole(sides: Sides) -> bool:
    """Are the cached files there, with all their bytes?"""
    try:
        return all(
            span.path.stat().st_size == span.num_tokens * np.dtype(span.dtype).itemsize
            and (span.starts is None or span.starts.stat().st_size > 0)
            for spans in sides
            for span in spans
        )
    except OSError:
        return False


def _write_summary(create: _Create, path: Path, summary: Summary) -> None:
    create(path).write(json.dumps(asdict(summary), indent=1).encode())


@contextmanager
def _writing(folder: Path) -> Iterator[_Create]:
    """Files that appear under their names, whole and on the disk, when the block ends without an exception.

    They appear in the order in which they were created. Raises PlanError if they can't be written, and DiskFullError
    where only the room is missing.
    """
    pending: list[tuple[BinaryIO, Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:

            def create(path: Path) -> BinaryIO:
                # Random, because process numbers repeat on the machines of a cluster that share a folder.
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
        fault = f"token files can't be written to {folder}: {error.strerror or error}"
        raise PlanError("data", [f"{fault}; make room there or name another run.folder"]) from None
    finally:
        for _, temporary, _ in pending:
            with suppress(OSError):  # it was renamed, or can't be removed either
                temporary.unlink()


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed while it wrote token files left there. Nobody may be writing there."""
    for path in folder.glob(".tokens-*.tmp"):
        with suppress(OSError):
            path.unlink()


def _sync_folder(folder: Path) -> None:
    """Put the renames on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
