"""Token files as one stream: spans of ids, joined without a copy, with the marks that tokens carry."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.sharding.token_marks import UNCOUNTED

# Tokens that are widened to int64 at a time while a file is counted: 32 MiB.
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenSpan:
    """`num_tokens` consecutive token ids in a file, from byte `offset_bytes` on.

    `dtype` is NumPy's name with its byte order, such as "<u2". One side of a data set is a tuple of
    spans that are read as one stream, so that files can be used, joined and split without a copy.

    `starts` is a file of little-endian int64: at which tokens documents begin, ascending, counted from a
    place that is `first_token` tokens before this span. Without it the span is one document.

    `answers` is such a file of pairs: where what is learned begins, and where it ends, counted likewise. Without it
    everything is.
    """

    path: Path
    dtype: str
    offset_bytes: int
    num_tokens: int
    starts: Path | None = None
    first_token: int = 0
    answers: Path | None = None

    def cut(self, start: int, stop: int) -> "TokenSpan":
        """Tokens [start, stop) of this span."""
        item_bytes = np.dtype(self.dtype).itemsize
        offset_bytes, first_token = self.offset_bytes + start * item_bytes, self.first_token + start
        return replace(self, offset_bytes=offset_bytes, num_tokens=stop - start, first_token=first_token)

    def open(self) -> NDArray[np.integer]:
        """The ids, [num_tokens], mapped from the file and not read yet. Raises OSError."""
        if not self.num_tokens:
            return np.empty(0, self.dtype)  # an empty range can't be mapped
        ids = np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.num_tokens,))
        return np.asarray(ids)  # a plain view of it: slicing the subclass costs several times more

    def document_starts(self) -> NDArray[np.int64]:
        """The contents of `starts`, mapped from the file and not read yet. Raises OSError."""
        return np.empty(0, np.int64) if self.starts is None else _numbers(self.starts)

    def counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """A mask of the tokens [start, stop) of this span that are learned. Raises OSError."""
        if self.answers is None:
            return np.ones(stop - start, np.bool_)
        return _within(_numbers(self.answers), self.first_token + start, self.first_token + stop)

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """The ids, a bounded number at a time, as int64."""
        ids = self.open()
        for start in range(0, self.num_tokens, _CHUNK_TOKENS):
            yield ids[start : start + _CHUNK_TOKENS].astype(np.int64)


def num_tokens(spans: Sequence[TokenSpan]) -> int:
    """Tokens in all `spans` together."""
    return sum(span.num_tokens for span in spans)


def cut(spans: Sequence[TokenSpan], start: int, stop: int) -> tuple[TokenSpan, ...]:
    """Tokens [start, stop) of the stream that `spans` are."""
    parts, begin = [], 0
    for span in spans:
        first, last = max(start - begin, 0), min(stop - begin, span.num_tokens)
        if first < last:
            parts.append(span.cut(first, last))
        begin += span.num_tokens
    return tuple(parts)


class TokenStream:
    """Spans read one after the other. With `marks`, a token that begins a document is given as -1 - id, and one that is
    not learned as id + UNCOUNTED, so that both go wherever the tokens go (parallel/context/document_mask.py)."""

    def __init__(self, spans: Sequence[TokenSpan], marks: bool = False) -> None:
        """Map the files. Raises OSError if one is gone."""
        held = [span for span in spans if span.num_tokens]
        self._arrays = [span.open() for span in held]
        self._documents = [(span.document_starts(), span.first_token) for span in held] if marks else []
        self._answers = [None if span.answers is None else _numbers(span.answers) for span in held] if marks else []
        # Where each array begins in the stream, and where the last one ends.
        self._starts = [0]
        for array in self._arrays:
            self._starts.append(self._starts[-1] + len(array))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill `row` with the tokens of the stream from `start` on, over the seams between files."""
        filled = 0
        index = bisect_right(self._starts, start) - 1
        while filled < len(row):
            begin = start + filled - self._starts[index]
            piece = self._arrays[index][begin : begin + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            if self._documents:
                self._mark(row[filled : filled + len(piece)], index, begin)
            filled += len(piece)
            index += 1

    def documents(self) -> NDArray[np.int64]:
        """Where documents begin in the stream, ascending, and where the last one ends: [documents + 1]."""
        found = []
        for (starts, first_token), array, begin in zip(self._documents, self._arrays, self._starts, strict=False):
            here = starts[slice(*np.searchsorted(starts, [first_token + 1, first_token + len(array)]))]
            found += [np.array([begin]), here - first_token + begin]  # a span begins a document
        return np.concatenate([*found, [len(self)]]).astype(np.int64)

    def first_learned(self) -> NDArray[np.int64]:
        """How many tokens of each document stand before the first that is learned: [documents], all of them where none
        is."""
        bounds, found = self.documents(), []
        for index, ((_, first_token), answers) in enumerate(zip(self._documents, self._answers, strict=True)):
            begin, end = self._starts[index : index + 2]
            # Of a span without answers all is learned; the file of one that was cut has those behind it, too.
            firsts = bounds if answers is None else answers[0::2] - first_token + begin
            found.append(firsts[(firsts >= begin) & (firsts < end)])
        learned = np.concatenate([*found, [len(self)]])
        firsts = learned[np.searchsorted(learned, bounds[:-1])]
        return np.minimum(firsts, bounds[1:]) - bounds[:-1]

    def _mark(self, tokens: NDArray[np.int64], index: int, begin: int) -> None:
        """Mark, in place, which of the tokens of a span from `begin` on begin a document or are not learned."""
        starts, first_token = self._documents[index]
        counted_from, answers = first_token + begin, self._answers[index]
        if answers is not None:
            tokens[~_within(answers, counted_from, counted_from + len(tokens))] += UNCOUNTED
        here = starts[slice(*np.searchsorted(starts, [counted_from, counted_from + len(tokens)]))] - counted_from
        here = here if begin else np.union1d(here, [0])  # a span begins a document, whatever it was cut from
        tokens[here] = -1 - (tokens[here] & (UNCOUNTED - 1))


def _numbers(path: Path) -> NDArray[np.int64]:
    """A file of numbers, mapped and not read yet."""
    return np.asarray(np.memmap(path, "<i8", "r")) if path.stat().st_size else np.empty(0, np.int64)


def _within(bounds: NDArray[np.int64], start: int, stop: int) -> NDArray[np.bool_]:
    """A mask of the numbers [start, stop) that lie in the ranges whose beginnings and ends are `bounds`."""
    first, last = np.searchsorted(bounds, [start, stop], side="right")
    turns = np.zeros(stop - start + 1, np.int64)
    turns[0] = first % 2
    np.add.at(turns, bounds[first:last] - start, 1)
    return np.cumsum(turns[:-1]) % 2 == 1
