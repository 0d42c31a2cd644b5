"""Token files that the user brings: they are memory-mapped in place, and every id is checked once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError, error_text
from shardwright.config.data import DataSpec
from shardwright.config.phrase import say
from shardwright.config.units import GIB
from shardwright.config.user_file import hole_bytes, open_file, system_reason
from shardwright.train.data.megatron_index import read_index
from shardwright.train.data.source_files import SourceFile, index_of
from shardwright.train.data.token_cache import Summary, make_summary, read_summary, save_summary
from shardwright.train.data.token_stream import TokenSpan, num_tokens
from shardwright.train.data.token_types import fitting_type, mistaken_type, usual_type, way_out_of_type, wider_type

# Holes that a sparse token file may have; a file system that compresses makes some of its own.
_MOST_HOLES_BYTES = GIB
# Document starts of the files that have them, by the file's number in the list of files.
Starts = dict[int, NDArray[np.int64]]


def open_token_files(
    files: list[SourceFile], data: DataSpec, vocab: int, faults: list[str], notes: list[str]
) -> tuple[list[TokenSpan], Starts]:
    """One span for each file, and the document starts from Megatron indices. A file that does not state its number
    type gets one from some blocks of its ids, and a note. Faults are appended to `faults`."""
    spans: list[TokenSpan] = []
    starts: Starts = {}
    for number, file in enumerate(files):
        try:
            if file.format == "megatron":
                _check_written(file)
                index = read_index(index_of(file.path), file.size_bytes)
                spans.append(TokenSpan(file.path, index.dtype, 0, index.num_tokens))
                starts[number] = index.starts
            elif file.path.suffix.lower() == ".npy":
                spans.append(_open_npy(file))
            else:
                spans.append(_open_bin(file, data.token_dtype, vocab, notes))
                continue
            if (wider := wider_type(spans[-1], vocab)) is not None:
                raise ValueError(mistaken_type(spans[-1], wider))
        except OSError as error:
            faults.append(
                say(
                    "{path} can't be read: {reason}; check its permissions",
                    path=file.path,
                    reason=system_reason(error),
                )
            )
        except ValueError as error:
            faults.append(error_text(error))
    return spans, starts


def _open_bin(file: SourceFile, dtype: str, vocab: int, notes: list[str]) -> TokenSpan:
    """Open a file of plain little-endian ids. Raises OSError, or ValueError with the fault."""
    _check_written(file)
    if dtype == "auto":
        return _open_as_it_looks(file, vocab, notes)
    span = _as_type(file, dtype)
    if (wider := wider_type(span, vocab)) is not None:
        raise ValueError(mistaken_type(span, wider))
    if (num_ids := int(np.iinfo(dtype).max) + 1) < vocab:
        notes.append(
            say(
                'data.token_dtype = "{dtype}" counts {num_ids:,} ids, and model.vocab is {vocab:,}: tokens from '
                "{num_ids:,} on are never in {name}",
                dtype=dtype,
                num_ids=num_ids,
                vocab=vocab,
                name=file.name,
            )
        )
    return span


def _open_as_it_looks(file: SourceFile, vocab: int, notes: list[str]) -> TokenSpan:
    """Open a file that does not state its number type: with the usual type for the vocabulary, or a wider one if the
    ids look like it."""
    usual = usual_type(vocab)
    span = _as_type(file, usual)
    wider = wider_type(span, vocab)
    if wider is None:
        if usual != "uint16":
            notes.append(
                say(
                    '{name} is read as {usual} (data.token_dtype = "auto"): model.vocab is {vocab:,}',
                    name=file.name,
                    usual=usual,
                    vocab=vocab,
                )
            )
        return span
    if wider != wider.newbyteorder("<"):
        raise ValueError(mistaken_type(span, wider))
    notes.append(
        say(
            '{name} is read as {type} (data.token_dtype = "auto"), for so its ids look: {num_ids:,} of them',
            name=file.name,
            type=wider.name,
            num_ids=span.num_tokens // (wider.itemsize // np.dtype(usual).itemsize),
        )
    )
    return _as_type(file, wider.name)


def _as_type(file: SourceFile, dtype: str) -> TokenSpan:
    """The file as ids of type `dtype`. Raises ValueError if its size is no multiple of that type's."""
    item_bytes = np.dtype(dtype).itemsize
    if file.size_bytes % item_bytes:
        raise ValueError(
            say(
                "{path} has {size_bytes} bytes, which is no whole number of {dtype} ids ({size_bytes} = {whole} x "
                "{item_bytes} + {rest}); set data.token_dtype to what it was written with",
                path=file.path,
                size_bytes=file.size_bytes,
                dtype=dtype,
                whole=file.size_bytes // item_bytes,
                item_bytes=item_bytes,
                rest=file.size_bytes % item_bytes,
            )
        )
    return TokenSpan(file.path, np.dtype(dtype).newbyteorder("<").str, 0, file.size_bytes // item_bytes)


def _open_npy(file: SourceFile) -> TokenSpan:
    """Open a one-dimensional .npy array of integers. Raises OSError, or ValueError with the fault."""
    _check_written(file)
    try:
        array = np.lib.format.open_memmap(file.path, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python, which may raise other errors
        raise ValueError(
            say(
                "{path} is a broken .npy file: {reason}; save it again with numpy.save",
                path=file.path,
                reason=error_text(error),
            )
        ) from None
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            say(
                "{path} is an array of {dtype} and shape {shape}, and token ids are integers in one dimension; save "
                "array.reshape(-1).astype('uint32')",
                path=file.path,
                dtype=array.dtype,
                shape=str(array.shape),
            )
        )
    return TokenSpan(file.path, array.dtype.str, array.offset, len(array))


def _check_written(file: SourceFile) -> None:
    """Raises OSError if the file can't be read, or ValueError if it is sparse: mostly holes that nobody wrote."""
    with open_file(file.path) as stream:
        holes = hole_bytes(stream)
    if holes > _MOST_HOLES_BYTES and holes > file.size_bytes // 2:
        raise ValueError(
            say(
                "{path} is a sparse file: of its {size_bytes:,} bytes {holes:,} were never written, and would be "
                "read as tokens 0; write it again, to its end",
                path=file.path,
                size_bytes=file.size_bytes,
                holes=holes,
            )
        )


def check_token_files(
    spans: list[TokenSpan], index_starts: Mapping[int, NDArray[np.int64]], data: DataSpec, vocab: int, cache: Path
) -> tuple[list[TokenSpan], Summary]:
    """Check every id of the files and find the documents, unless the cache has a summary of them. `index_starts` are
    the document starts from indices, by the span's number; `cache` is a path without a suffix. Returns the spans, with
    their files of document starts. Raises PlanError."""
    root = cache.absolute()
    spans = [
        replace(span, starts=root.with_name(f"{root.name}.{n}.starts.bin"))
        if n in index_starts or data.end_of_document >= 0
        else span
        for n, span in enumerate(spans)
    ]
    summary_path = root.with_name(f"{root.name}.json")
    summary = read_summary(summary_path)
    if summary and summary.largest_id < vocab and all(span.starts is None or span.starts.exists() for span in spans):
        return spans, summary
    faults: list[str] = []
    starts: dict[Path, NDArray[np.int64]] = {}
    counts = np.zeros(vocab, np.int64)
    for number, span in enumerate(spans):
        fault, span_counts = _count_ids(span, vocab)
        if fault:
            faults.append(fault)
            continue
        counts += span_counts
        if span.starts is not None:
            starts[span.starts] = (
                index_starts[number] if number in index_starts else _find_starts(span, data.end_of_document)
            )
    if faults:
        raise PlanError("data", faults)
    dtypes = ", ".join(sorted({span.dtype for span in spans}))
    num_documents = sum(map(len, starts.values())) + sum(span.starts is None for span in spans)
    summary = make_summary(dtypes, num_documents, (num_tokens(spans), 0), counts)
    save_summary(summary_path, summary, starts)
    return spans, summary


def _find_starts(span: TokenSpan, end_of_document: int) -> NDArray[np.int64]:
    """The document starts of a span: its first token, and each token after an end of document."""
    parts, begin = [np.zeros(1, np.int64)], 1
    for ids in span.chunks():
        parts.append(np.flatnonzero(ids == end_of_document) + begin)
        begin += len(ids)
    starts = np.concatenate(parts)
    return starts[starts < span.num_tokens]


def _count_ids(span: TokenSpan, vocab: int) -> tuple[str, NDArray[np.int64]]:
    """A fault if an id is outside the vocabulary, else "", and how often each id occurs: [vocab]."""
    counts = np.zeros(vocab, np.int64)
    start, first_outside, smallest, largest = 0, "", 0, 0
    try:
        for ids in span.chunks():
            outside = np.flatnonzero((ids < 0) | (ids >= vocab))
            if outside.size and not first_outside:
                first_outside = say("token {place} is id {id}", place=start + int(outside[0]), id=ids[outside[0]])
            smallest, largest = min(smallest, int(ids.min())), max(largest, int(ids.max()))
            start += len(ids)
            if not first_outside:
                counts += np.bincount(ids, minlength=vocab)
    except OSError as error:
        return say(
            "{path} can't be read: {reason}; check its permissions", path=span.path, reason=system_reason(error)
        ), counts
    if not first_outside:
        return "", counts
    fitting = fitting_type(span, vocab)
    if fitting is not None:
        way_out = say(
            "as {type} its ids are within: {way_out}", type=fitting.name, way_out=way_out_of_type(span, fitting)
        )
    elif smallest < 0:
        is_plain = span.path.suffix == ".bin" and not index_of(span.path).exists()
        remedy = (
            say("set data.token_dtype to what the file was written with")
            if is_plain
            else say("write it again as uint32")
        )
        way_out = say("ids are never negative: {remedy}", remedy=remedy)
    else:
        way_out = say(
            "use model.vocab = {least} or another tokenizer (or data.token_dtype is not the file's)", least=largest + 1
        )
    return say(
        "{path}: {first_outside}, and model.vocab = {vocab} means ids 0 to {last}; {way_out}",
        path=span.path,
        first_outside=first_outside,
        vocab=vocab,
        last=vocab - 1,
        way_out=way_out,
    ), counts
