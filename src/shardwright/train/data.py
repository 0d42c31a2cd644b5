"""The data of a run: from what the user names to two streams of token ids, prepared once and cached.

`prepare_tokens` finds, checks, tokenizes and splits; `Samples` cuts a stream into training samples. Text is
tokenized to files in a cache folder; files that are token ids already are used where they lie.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.spec.base import PlanError
from shardwright.spec.job import DataSpec
from shardwright.spec.model import ModelSpec
from shardwright.train.samples import Samples, TokenSpan, cut, num_tokens, unigram_loss
from shardwright.train.tokens import (
    Document,
    SourceFile,
    Tokenizer,
    find_files,
    load_tokenizer,
    read_documents,
)

__all__ = [
    "Samples",
    "TokenFiles",
    "TokenSpan",
    "Tokenizer",
    "load_tokenizer",
    "num_tokens",
    "prepare_tokens",
    "unigram_loss",
]

# Part of every cache name: a change of what is written under the same name must change it.
_CACHE_VERSION = 1
# Text that is tokenized at a time. A tokenizer needs some 50 bytes of memory for each character.
_BATCH_CHARACTERS = 4 << 20
# Of a document, what its side of the split is decided by, next to its name.
_HASHED_CHARACTERS = 1024
# Opens a file that will appear under the given path.
_Create = Callable[[Path], BinaryIO]
# Train and held out, each to be read as one stream.
_Sides = tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...]]


@dataclass(frozen=True)
class TokenFiles:
    """Prepared data: two streams of token ids, and what is known about them.

    `train` and `validation` are spans to be read one after the other; validation is None where nothing is
    held out. `split` says what was held out: whole documents, or the tail of the stream. A token file
    counts as one document. `unigram_entropy` is that of all tokens, in nats per token. `seed` is that of
    the order of samples; which tokens are on which side doesn't depend on it.
    """

    train: tuple[TokenSpan, ...]
    validation: tuple[TokenSpan, ...] | None
    split: Literal["none", "documents", "tail"]
    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    largest_id: int
    unigram_entropy: float
    sequence: int
    seed: int

    def train_samples(self) -> Samples:
        """Training samples, shuffled anew in every epoch."""
        return Samples(self.train, self.sequence, self.seed)

    def validation_samples(self) -> Samples | None:
        """Held-out samples in file order; None where nothing is held out."""
        return Samples(self.validation, self.sequence, self.seed, shuffle=False) if self.validation else None


def prepare_tokens(data: DataSpec, model: ModelSpec, seed: int, folder: Path) -> TokenFiles:
    """Find the documents that `data` names, turn them into token ids and split them in two.

    A document is held out if a hash of its name and beginning falls under data.validation_share. That is the
    same on every machine and for every seed, and stays the same for the old documents when new ones come.
    Where it leaves a side without a whole window, and for one document or token files, the last
    validation_share of all tokens is held out instead, and at least a window.

    Token files of text are cached in `folder`, which is made if need be, under a name that depends on
    the files, their sizes and times, and how they are read. They appear under that name only when whole, so
    that any number of processes may prepare the same data at once, or be killed while they do.

    Raises PlanError with every fault: those that show before any text is read (paths, tokenizer, sizes), or
    if there are none, those in the text.
    """
    faults: list[str] = []
    files = find_files(data, faults)
    in_place = [file for file in files if file.format == "tokens"]
    if in_place and len(in_place) < len(files):
        tokens, text = in_place[0], next(file for file in files if file.format != "tokens")
        faults.append(
            f"data.path {data.path} has token files ({tokens.name}) beside text ({text.name}), and a run reads "
            f"one or the other; name one kind by a glob such as FOLDER/*{tokens.path.suffix}, or set data.format"
        )
    tokenizer = _load_checked(data, model, bool(in_place), faults)
    spans = _open_token_files(in_place, data, faults)
    if tokenizer is None or faults:
        raise PlanError("data", faults)
    key = _cache_key(files, data, tokenizer)
    if in_place:
        summary = _summarize(spans, model.vocab, folder / f"{key}.json")
        sides: _Sides = (tuple(spans), ())
    else:
        summary = _tokenize(files, data, tokenizer, folder, key)
        sides = _cached_spans(summary, folder, key)
    return _split(summary, sides, data, model, seed)


@dataclass(frozen=True)
class _Summary:
    """What the JSON file beside the token files says; unigram_entropy in nats per token."""

    dtype: str
    num_documents: int
    num_train_tokens: int
    num_held_out_tokens: int
    largest_id: int
    unigram_entropy: float


def _load_checked(data: DataSpec, model: ModelSpec, in_place: bool, faults: list[str]) -> Tokenizer | None:
    try:
        tokenizer = load_tokenizer(data)
    except PlanError as error:
        faults.extend(error.faults)
        return None
    # Token files come from a tokenizer that we don't know; their ids are checked one by one.
    if tokenizer.num_ids > model.vocab and not in_place:
        num_ids, vocab = tokenizer.num_ids, model.vocab
        faults.append(
            f"tokenizer {data.tokenizer} gives ids 0 to {num_ids - 1}, and model.vocab is {vocab} "
            f"({num_ids} > {vocab}); use model.vocab = {num_ids} or another tokenizer"
        )
    return tokenizer


def _cache_key(files: list[SourceFile], data: DataSpec, tokenizer: Tokenizer) -> str:
    """Names what would be written: the same for the same files read in the same way."""
    # Neither sequence nor vocab is in it: they decide if the tokens will do, not what they are.
    if files[0].format == "tokens":
        how: list[int | float | str] = [_CACHE_VERSION, data.token_dtype]
    else:
        how = [_CACHE_VERSION, data.text_field, tokenizer.fingerprint, data.validation_share]
    what = [[os.fspath(file.path), file.name, file.size_bytes, file.mtime_ns, file.format] for file in files]
    # A file name that is not UTF-8 comes as surrogates, which json escapes.
    return "tokens-" + blake2b(json.dumps([how, what]).encode(), digest_size=16).hexdigest()


# --- files that are token ids already ---


def _open_token_files(files: list[SourceFile], data: DataSpec, faults: list[str]) -> list[TokenSpan]:
    """One span a file, without reading the ids."""
    spans = []
    for file in files:
        try:
            if file.path.suffix.lower() == ".npy":
                spans.append(_open_npy(file))
            else:
                spans.append(_open_bin(file, data.token_dtype))
        except OSError as error:
            faults.append(f"{file.path} can't be read: {error.strerror or error}; check its permissions")
        except ValueError as error:
            faults.append(str(error))
    return spans


def _open_bin(file: SourceFile, dtype: str) -> TokenSpan:
    """Little-endian ids and nothing else. Raises OSError, or ValueError with the fault."""
    with file.path.open("rb"):  # only to see now that it can be
        pass
    item_bytes = np.dtype(dtype).itemsize
    if file.size_bytes % item_bytes:
        raise ValueError(
            f"{file.path} has {file.size_bytes} bytes, which is no whole number of {dtype} ids "
            f"({file.size_bytes} = {file.size_bytes // item_bytes} x {item_bytes} + "
            f"{file.size_bytes % item_bytes}); set data.token_dtype to what it was written with"
        )
    return TokenSpan(file.path, np.dtype(dtype).newbyteorder("<").str, 0, file.size_bytes // item_bytes)


def _open_npy(file: SourceFile) -> TokenSpan:
    """A one-dimensional array of integers. Raises OSError, or ValueError with the fault."""
    try:
        array = np.lib.format.open_memmap(file.path, mode="r")
    except ValueError as error:
        raise ValueError(f"{file.path} is a broken .npy file: {error}; save it again with numpy.save") from None
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"{file.path} is an array of {array.dtype} and shape {array.shape}, and token ids are integers "
            f"in one dimension; save array.reshape(-1).astype('uint32')"
        )
    return TokenSpan(file.path, array.dtype.str, array.offset, len(array))


def _summarize(spans: list[TokenSpan], vocab: int, cache: Path) -> _Summary:
    """Check every id of the files, or trust the cache. Raises PlanError."""
    summary = _read_summary(cache)
    if summary and summary.largest_id < vocab:
        return summary
    faults: list[str] = []
    counts = np.zeros(vocab, np.int64)
    for span in spans:
        fault, found = _count_ids(span, vocab)
        if fault:
            faults.append(fault)
        else:
            counts += found
    if faults:
        raise PlanError("data", faults)
    dtypes = ", ".join(sorted({span.dtype for span in spans}))
    summary = _make_summary(dtypes, len(spans), (num_tokens(spans), 0), counts)
    with _writing(cache.parent) as create:
        _write_summary(create, cache, summary)
    return summary


def _count_ids(span: TokenSpan, vocab: int) -> tuple[str, NDArray[np.int64]]:
    """How often each id occurs, [vocab], or a fault if one is outside the vocabulary."""
    counts = np.zeros(vocab, np.int64)
    start, first, smallest, largest = 0, "", 0, 0
    try:
        for ids in span.chunks():
            outside = np.flatnonzero((ids < 0) | (ids >= vocab))
            if outside.size and not first:
                first = f"token {start + int(outside[0])} is id {ids[outside[0]]}"
            smallest, largest = min(smallest, int(ids.min())), max(largest, int(ids.max()))
            start += len(ids)
            if not first:
                counts += np.bincount(ids, minlength=vocab)
    except OSError as error:
        return f"{span.path} can't be read: {error.strerror or error}; check its permissions", counts
    if not first:
        return "", counts
    if smallest < 0:
        way_out = "ids are never negative: set data.token_dtype to what the file was written with"
    else:
        way_out = f"use model.vocab = {largest + 1} or another tokenizer (or data.token_dtype is not the file's)"
    return f"{span.path}: {first}, and model.vocab = {vocab} means ids 0 to {vocab - 1}; {way_out}", counts


# --- text to token files ---


def _tokenize(files: list[SourceFile], data: DataSpec, tokenizer: Tokenizer, folder: Path, key: str) -> _Summary:
    """Write the token files of `key`, unless they are there. Raises PlanError."""
    summary = _read_summary(folder / f"{key}.json")
    if summary and _is_whole(_cached_spans(summary, folder, key)):
        return summary
    faults: list[str] = []
    dtype = np.min_scalar_type(max(tokenizer.num_ids - 1, 0)).newbyteorder("<")
    with _writing(folder) as create:
        outputs = [create(folder / f"{key}.{side}.bin") for side in ("train", "validation")]
        writer = _TokenWriter(tokenizer, dtype, outputs)
        for document in read_documents(files, data.text_field, faults):
            _write_document(writer, document, data.validation_share)
            if faults:  # what is written will be thrown away; read on for the other faults
                writer.drop()
        if faults:
            raise PlanError("data", faults)
        writer.flush()
        numbers = (writer.num_tokens[0], writer.num_tokens[1])
        summary = _make_summary(dtype.str, writer.num_documents, numbers, writer.counts)
        # Last: where it is, the token files are.
        _write_summary(create, folder / f"{key}.json", summary)
    return summary


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
    """Collects text, tokenizes it in batches, and appends the ids to the file of its side (0 or 1)."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype, outputs: list[BinaryIO]) -> None:
        self.num_documents = 0
        self.num_tokens = [0, 0]
        self.counts = np.zeros(tokenizer.num_ids, np.int64)
        self._tokenizer = tokenizer
        self._end = np.array(tokenizer.end_of_text, np.int64)
        self._dtype = dtype
        self._outputs = outputs
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
        for side, is_end in zip(self._sides, self._is_end, strict=True):
            ids_of[side].append(self._end if is_end else next(encoded))
        for side, parts in enumerate(ids_of):
            ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
            self._outputs[side].write(ids.astype(self._dtype).tobytes())
            self.num_tokens[side] += len(ids)
            self.counts += np.bincount(ids, minlength=len(self.counts))
        self.drop()


# --- the cache ---


@contextmanager
def _writing(folder: Path) -> Iterator[_Create]:
    """Files that appear under their names, whole and on the disk, when the block ends without an exception.

    They appear in the order in which they were created. Raises PlanError if they can't be written.
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
        fault = f"token files can't be written to {folder}: {error.strerror or error}"
        raise PlanError("data", [f"{fault}; make room there or name another run.folder"]) from None
    finally:
        for _, temporary, _ in pending:
            with suppress(OSError):  # it was renamed, or can't be removed either
                temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Put the renames on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cached_spans(summary: _Summary, folder: Path, key: str) -> _Sides:
    """Where the token files of text are, train and held out; an empty one is no span."""
    numbers = {"train": summary.num_train_tokens, "validation": summary.num_held_out_tokens}
    train, held_out = (
        (TokenSpan(folder.absolute() / f"{key}.{side}.bin", summary.dtype, 0, number),) if number else ()
        for side, number in numbers.items()
    )
    return train, held_out


def _is_whole(sides: _Sides) -> bool:
    """Are the cached files there, with all their bytes?"""
    try:
        return all(
            span.path.stat().st_size == span.num_tokens * np.dtype(span.dtype).itemsize
            for spans in sides
            for span in spans
        )
    except OSError:
        return False


def _make_summary(dtype: str, num_documents: int, numbers: tuple[int, int], counts: NDArray[np.int64]) -> _Summary:
    """`numbers`: train and held-out tokens; `counts`: how often each id occurs, [vocab]."""
    occurring = counts[counts > 0] / max(int(counts.sum()), 1)
    entropy = math.fsum(-occurring * np.log(occurring))
    largest_id = int(np.flatnonzero(counts)[-1]) if occurring.size else 0
    return _Summary(dtype, num_documents, *numbers, largest_id, entropy)


def _write_summary(create: _Create, path: Path, summary: _Summary) -> None:
    create(path).write(json.dumps(asdict(summary), indent=1).encode())


def _read_summary(path: Path) -> _Summary | None:
    """None if there is none, or none that this version can read: it is made anew."""
    try:
        return _Summary(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


# --- train and validation ---


def _split(
    summary: _Summary,
    sides: _Sides,
    data: DataSpec,
    model: ModelSpec,
    seed: int,
) -> TokenFiles:
    """The two sides, each with a window at least. Raises PlanError if there is too little data for that."""
    train, validation = sides
    window, total = model.sequence + 1, num_tokens(train) + num_tokens(validation)
    split: Literal["none", "documents", "tail"] = "documents"
    if total < window * (2 if data.validation_share else 1):
        raise PlanError("data", [_too_little(total, data, model)])
    if not data.validation_share:
        split = "none"
    elif min(num_tokens(train), num_tokens(validation)) < window:
        split = "tail"
        num_tail = min(max(round(total * data.validation_share), window), total - window)
        stream = train + validation
        train, validation = cut(stream, 0, total - num_tail), cut(stream, total - num_tail, total)
    return TokenFiles(
        train=train,
        validation=validation or None,
        split=split,
        num_documents=summary.num_documents,
        num_train_tokens=num_tokens(train),
        num_validation_tokens=num_tokens(validation),
        largest_id=summary.largest_id,
        unigram_entropy=summary.unigram_entropy,
        sequence=model.sequence,
        seed=seed,
    )


def _too_little(total: int, data: DataSpec, model: ModelSpec) -> str:
    window, num_sides = model.sequence + 1, 2 if data.validation_share else 1
    needed = f"model.sequence {model.sequence} + 1 = {window} tokens"
    if num_sides == 2:
        needed = f"train and validation each need {needed}, together {2 * window}"
    else:
        needed = f"training needs {needed}"
    ways_out = ["more text"]
    if total // num_sides > 1:
        ways_out.append(f"model.sequence = {total // num_sides - 1} or less")
    if num_sides == 2 and total >= window:
        ways_out.append("data.validation_share = 0")
    return f"data.path {data.path} holds {total} tokens, and {needed}; use {' or '.join(ways_out)}"
