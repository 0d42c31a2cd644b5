"""The data of a run: from what the user names to two streams of token ids, prepared once and cached.

`prepare_tokens` finds, checks, tokenizes and splits; `Samples` cuts a stream into training samples. Text is
tokenized to files in a cache folder; files that are token ids already are used where they lie.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.config.units import GIB
from shardwright.config.user_file import hole_bytes, open_file
from shardwright.train.data.document_files import SourceFile, find_files
from shardwright.train.data.samples import Samples
from shardwright.train.data.token_cache import (
    Sides,
    Summary,
    cache_key,
    cached_spans,
    make_summary,
    read_summary,
    save_summary,
    tokenize,
)
from shardwright.train.data.token_stream import TokenSpan, cut, num_tokens
from shardwright.train.data.tokenizer import Tokenizer, load_tokenizer

# Of a token file that is mostly holes; a file system that compresses may have some of its own.
_MOST_HOLES_BYTES = GIB


@dataclass(frozen=True)
class TokenFiles:
    """Prepared data: two streams of token ids, and what is known about them.

    `train` and `validation` are spans to be read one after the other; validation is None where nothing is
    held out. `split` says what was held out: whole documents, or the tail of the stream. A token file
    counts as one document, unless data.end_of_document says where documents end in it. `unigram_entropy` is
    that of all tokens, in nats per token. `seed` is that of the order of samples; which tokens are on which
    side doesn't depend on it. With `separate_documents`, samples mark where documents begin.
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
    separate_documents: bool = False
    dropped_share: float = 0.0  # of the text's characters: those for which the tokenizer has no token

    def train_samples(self) -> Samples:
        """Training samples, shuffled anew in every epoch."""
        return Samples(self.train, self.sequence, self.seed, marks=self.separate_documents)

    def validation_samples(self) -> Samples | None:
        """Held-out samples in file order; None where nothing is held out."""
        if not self.validation:
            return None
        return Samples(self.validation, self.sequence, self.seed, shuffle=False, marks=self.separate_documents)


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
    key = cache_key(files, data, tokenizer)
    if in_place:
        spans = _with_starts(spans, data, folder / key)
        summary = _summarize(spans, data, model.vocab, folder / f"{key}.json")
        sides: Sides = (tuple(spans), ())
    else:
        summary = tokenize(files, data, tokenizer, folder, key=key)
        sides = cached_spans(summary, folder, key)
    return _split(summary, sides, data, model, seed)


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
    _check_written(file)
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
    _check_written(file)
    try:
        array = np.lib.format.open_memmap(file.path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a header is Python's syntax, read by its tokenizer, which raises errors of its own
        raise ValueError(f"{file.path} is a broken .npy file: {error}; save it again with numpy.save") from None
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"{file.path} is an array of {array.dtype} and shape {array.shape}, and token ids are integers "
            f"in one dimension; save array.reshape(-1).astype('uint32')"
        )
    return TokenSpan(file.path, array.dtype.str, array.offset, len(array))


def _check_written(file: SourceFile) -> None:
    """Raises OSError if it can't be read, or ValueError if it is terabytes of what nobody wrote."""
    with open_file(file.path) as stream:
        holes = hole_bytes(stream)
    if holes > _MOST_HOLES_BYTES and holes > file.size_bytes // 2:
        raise ValueError(
            f"{file.path} is a sparse file: of its {file.size_bytes:,} bytes {holes:,} were never written, and would "
            "be read as tokens 0; write it again, to its end"
        )


def _with_starts(spans: list[TokenSpan], data: DataSpec, cache: Path) -> list[TokenSpan]:
    """The spans, and where it will be said at which of their tokens documents begin."""
    if data.end_of_document < 0:
        return spans
    root = cache.absolute()
    return [replace(span, starts=root.with_name(f"{root.name}.{n}.starts.bin")) for n, span in enumerate(spans)]


def _summarize(spans: list[TokenSpan], data: DataSpec, vocab: int, cache: Path) -> Summary:
    """Check every id of the files and find the documents, or trust the cache. Raises PlanError."""
    summary = read_summary(cache)
    if summary and summary.largest_id < vocab:
        return summary
    faults: list[str] = []
    starts: dict[Path, NDArray[np.int64]] = {}
    counts = np.zeros(vocab, np.int64)
    for span in spans:
        fault, found = _count_ids(span, vocab)
        if fault:
            faults.append(fault)
        else:
            counts += found
            if span.starts is not None:
                starts[span.starts] = _find_starts(span, data.end_of_document)
    if faults:
        raise PlanError("data", faults)
    dtypes = ", ".join(sorted({span.dtype for span in spans}))
    num_documents = sum(map(len, starts.values())) or len(spans)
    summary = make_summary(dtypes, num_documents, (num_tokens(spans), 0), counts)
    save_summary(cache, summary, starts)
    return summary


def _find_starts(span: TokenSpan, end_of_document: int) -> NDArray[np.int64]:
    """The first token, and each that follows an end."""
    found, begin = [np.zeros(1, np.int64)], 1
    for ids in span.chunks():
        found.append(np.flatnonzero(ids == end_of_document) + begin)
        begin += len(ids)
    starts = np.concatenate(found)
    return starts[starts < span.num_tokens]


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


# --- train and validation ---


def _split(summary: Summary, sides: Sides, data: DataSpec, model: ModelSpec, seed: int) -> TokenFiles:
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
        separate_documents=data.separate_documents,
        dropped_share=summary.dropped_share,
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
