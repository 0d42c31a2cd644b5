"""Token files as one stream: spans of ids, joined without a copy, with marks on tokens."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.sharding.token_marks import UNCOUNTED

# Tokens that are converted to int64 at once: 32 MiB.
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenSpan:
    """`num_tokens` consecutive token ids in a file, from byte `offset_bytes` on.

    `dtype` is NumPy's name with its byte order, such as "<u2". One side of a data set is a tuple of spans that are read
    as one stream, so that files can be used, joined and split without a copy.

    `starts` is a file of little-endian int64: the tokens at which documents begin, ascending. They are counted from
    `first_token` tokens before this span. Without it the span is one document.

    `answers` is a file of pairs of such numbers: begin and end of each range of learned tokens, counted in the same
    way. Without it all tokens are learned.
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
        """The ids, [num_tokens], memory-mapped and not read yet. Raises OSError."""
        if not self.num_tokens:
            return np.empty(0, self.dtype)  # an empty range can't be mapped
        ids = np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.num_tokens,))
        return np.asarray(ids)  # a plain view: slicing the subclass np.memmap costs several times more

    def document_starts(self) -> NDArray[np.int64]:
        """The contents of `starts`, memory-mapped and not read yet. Raises OSError."""
        return np.empty(0, np.int64) if self.starts is None else _numbers(self.starts)

    def counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """A mask of the learned tokens among [start, stop) of this span. Raises OSError."""
        if self.answers is None:
            return np.ones(stop - start, np.bool_)
        return _within(_numbers(self.answers), self.first_token + start, self.first_token + stop)

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """The ids, a bounded number at a time, as int64."""
        ids = self.open()
        for start in range(0, self.num_tokens, _CHUNK_TOKENS):
            yield ids[start : start + _CHUNK_TOKENS].astype(np.int64)


def num_tokens(spans: Sequence[TokenSpan]) -> int:
    """The number of tokens in all `spans`."""
    return sum(span.num_tokens for span in spans)


def cut(spans: Sequence[TokenSpan], start: int, stop: int) -> tuple[TokenSpan, ...]:
    """Tokens [start, stop) of the stream of `spans`."""
    parts, begin = [], 0
    for span in spans:
        span_start, span_stop = max(start - begin, 0), min(stop - begin, span.num_tokens)
        if span_start < span_stop:
            parts.append(span.cut(span_start, span_stop))
        begin += span.num_tokens
    return tuple(parts)


class TokenStream:
    """Spans read one after the other. With `marks`, a token that is not learned is given as id + UNCOUNTED, and one
    that begins a document as -1 - id: marks travel with the tokens (parallel/context/document_mask.py)."""

    def __init__(self, spans: Sequence[TokenSpan], marks: bool = False) -> None:
        """Map the files. Raises OSError if one is gone."""
        spans = [span for span in spans if span.num_tokens]
        self._arrays = [span.open() for span in spans]
        self._documents = [(span.document_starts(), span.first_token) for span in spans] if marks else []
        self._answers = [None if span.answers is None else _numbers(span.answers) for span in spans] if marks else []
        # The position of each array in the stream, and the end of the last one.
        self._starts = [0]
        for array in self._arrays:
            self._starts.append(self._starts[-1] + len(array))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill `row` with the tokens of the stream from `start` on, across files."""
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
        """The bounds of documents: the position at which each begins, ascending, and the end of the last one:
        [documents + 1]."""
        parts = []
        for (starts, first_token), array, begin in zip(self._documents, self._arrays, self._starts, strict=False):
            in_span = starts[slice(*np.searchsorted(starts, [first_token + 1, first_token + len(array)]))]
            parts += [np.array([begin]), in_span - first_token + begin]  # each span begins a document
        return np.concatenate([*parts, [len(self)]]).astype(np.int64)

    def first_learned(self) -> NDArray[np.int64]:
        """The number of tokens before the first learned one of each document, or all of them if none is learned:
        [documents]."""
        bounds, parts = self.documents(), []
        for index, ((_, first_token), answers) in enumerate(zip(self._documents, self._answers, strict=True)):
            begin, end = self._starts[index : index + 2]
            # In a span without answers all tokens are learned. If the span was cut, its file has answers outside of it.
            firsts = bounds if answers is None else answers[0::2] - first_token + begin
            parts.append(firsts[(firsts >= begin) & (firsts < end)])
        learned = np.concatenate([*parts, [len(self)]])
        firsts = learned[np.searchsorted(learned, bounds[:-1])]
        return np.minimum(firsts, bounds[1:]) - bounds[:-1]

    def _mark(self, tokens: NDArray[np.int64], index: int, begin: int) -> None:
        """Mark `tokens` in place: those that are not learned, and those that begin a document. They are the tokens of
        span `index` from `begin` on."""
        starts, first_token = self._documents[index]
        position, answers = first_token + begin, self._answers[index]
        if answers is not None:
            tokens[~_within(answers, position, position + len(tokens))] += UNCOUNTED
        begins = starts[slice(*np.searchsorted(starts, [position, position + len(tokens)]))] - position
        begins = begins if begin else np.union1d(begins, [0])  # each span begins a document, also if it was cut
        tokens[begins] = -1 - (tokens[begins] & (UNCOUNTED - 1))


def _numbers(path: Path) -> NDArray[np.int64]:
    """A file of little-endian int64, memory-mapped and not read yet."""
    return np.asarray(np.memmap(path, "<i8", "r")) if path.stat().st_size else np.empty(0, np.int64)


def _within(bounds: NDArray[np.int64], start: int, stop: int) -> NDArray[np.bool_]:
    """A mask of the numbers [start, stop) that lie within ranges. `bounds` are the begin and end of each range."""
    begin, end = np.searchsorted(bounds, [start, stop], side="right")
    turns = np.zeros(stop - start + 1, np.int64)
    turns[0] = begin % 2
    np.add.at(turns, bounds[begin:end] - start, 1)
    return np.cumsum(turns[:-1]) % 2 == 1
