"""Token files to samples: windows of tokens, in an order that is a function of (seed, samples consumed).

No rank, world size or batch size enters, so a run that changes its plan in the middle sees the same samples.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Tokens that are widened to int64 at a time while a file is counted: 32 MiB.
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenSpan:
    """`num_tokens` consecutive token ids in a file, from byte `offset_bytes` on.

    `dtype` is NumPy's name with its byte order, such as "<u2". One side of a data set is a tuple of
    spans that are read as one stream, so that files can be used, joined and split without a copy.

    `starts` is a file of little-endian int64: at which tokens documents begin, ascending, counted from a
    place that is `first_token` tokens before this span. Without it the span is one document.
    """

    path: Path
    dtype: str
    offset_bytes: int
    num_tokens: int
    starts: Path | None = None
    first_token: int = 0

    def cut(self, start: int, stop: int) -> "TokenSpan":
        """Tokens [start, stop) of this span."""
        item_bytes = np.dtype(self.dtype).itemsize
        offset_bytes, first_token = self.offset_bytes + start * item_bytes, self.first_token + start
        return TokenSpan(self.path, self.dtype, offset_bytes, stop - start, starts=self.starts, first_token=first_token)

    def open(self) -> NDArray[np.integer]:
        """The ids, [num_tokens], mapped from the file and not read yet. Raises OSError."""
        if not self.num_tokens:
            return np.empty(0, self.dtype)  # an empty range can't be mapped
        ids = np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.num_tokens,))
        return np.asarray(ids)  # a plain view of it: slicing the subclass costs several times more

    def document_starts(self) -> NDArray[np.int64]:
        """What `starts` says, mapped from the file and not read yet. Raises OSError."""
        if self.starts is None or not self.starts.stat().st_size:
            return np.empty(0, np.int64)
        return np.asarray(np.memmap(self.starts, "<i8", "r"))

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


class Samples:
    """The windows of one side of the data, as an endless sequence of samples.

    Window w is tokens[w * sequence : (w + 1) * sequence + 1]: `sequence` inputs, and as targets the same
    shifted by one. Inputs don't overlap, and a rest shorter than a window is left out. Sample `number` is
    the number-th ever consumed: epoch = number // len(samples), and in each epoch every window comes once,
    in an order of that epoch's own (`shuffled`), or in file order if `shuffle` is false.

    With `marks`, a token that begins a document is given as -1 - id: its complement, which is negative, so that
    where documents lie goes wherever the tokens go (parallel/context/document_mask.py).
    """

    def __init__(
        self, tokens: Sequence[TokenSpan], sequence: int, seed: int, shuffle: bool = True, marks: bool = False
    ) -> None:
        """Map the files. Raises ValueError if `tokens` hold no whole window, OSError if a file is gone."""
        self.sequence = sequence
        self.seed = seed
        self.shuffle = shuffle
        self.num_tokens = num_tokens(tokens)
        self._num_windows = max(self.num_tokens - 1, 0) // sequence
        if not self._num_windows:
            raise ValueError(f"{self.num_tokens} tokens hold no window of {sequence} + 1 tokens")
        self._arrays = [span.open() for span in tokens if span.num_tokens]
        held = [span for span in tokens if span.num_tokens] if marks else []
        self._documents = [(span.document_starts(), span.first_token) for span in held]
        # Where each array begins in the stream, and where the last one ends.
        self._starts = [0]
        for array in self._arrays:
            self._starts.append(self._starts[-1] + len(array))

    def __len__(self) -> int:
        """Windows, and so samples of one epoch."""
        return self._num_windows

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]. May cross epochs. Raises ValueError
        if `first` or `count` is negative."""
        if first < 0 or count < 0:
            raise ValueError(f"samples are counted from 0, and {count} from {first} on were asked for")
        rows = np.empty((count, self.sequence + 1), np.int64)
        for row, window in zip(rows, self._windows(first, count).tolist(), strict=True):
            self._read(window * self.sequence, row)
        return rows

    def _windows(self, first: int, count: int) -> NDArray[np.int64]:
        """Which window each of these samples is: [count]."""
        epochs, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self))
        if not self.shuffle:
            return positions
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            windows[here] = shuffled(positions[here], len(self), self.seed, epoch)
        return windows

    def _read(self, start: int, row: NDArray[np.int64]) -> None:
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

    def _mark(self, tokens: NDArray[np.int64], index: int, begin: int) -> None:
        """Mark, in place, which of the tokens of a span from `begin` on begin a document."""
        starts, first_token = self._documents[index]
        counted_from = first_token + begin
        here = starts[slice(*np.searchsorted(starts, [counted_from, counted_from + len(tokens)]))] - counted_from
        tokens[here] = -1 - tokens[here]
        if begin == 0:  # a span begins a document, whatever it was cut from
            tokens[0] = min(tokens[0], -1 - tokens[0])


def shuffled(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of range(size) sends `positions`: [n] to [n].

    The permutation is a function of (size, seed, epoch) and is never stored: memory is that of
    `positions`, for 10 windows or 10^12. It is a Feistel network (Luby and Rackoff 1988, "How to construct
    pseudorandom permutations from pseudorandom functions"): split a number of 2h bits in two halves and
    repeat (left, right) -> (right, left xor f(key, right)). Whatever f is, each round can be undone, so the
    whole is a permutation of range(4^h). We take the smallest such range that holds `size`, and a result
    that falls outside is sent through again until it falls inside: cycle walking (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). That walk follows a cycle of the larger permutation from
    an element inside, so it does come back inside, and no two walks meet. 4^h < 4 x size, so fewer than
    four passes are expected.

    Luby and Rackoff need 3 or 4 rounds of a true pseudo-random f; 8 of a mere mixing function also
    scatter the small ranges, where a half has few bits. This is good for shuffling, not for secrets.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(blake2b(f"{seed}:{epoch}".encode()).digest(), "<u8")  # 64 bytes: 8 rounds
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of range(4 ** half_bits), applied to `values` [n]; one round a key."""
    bits = np.uint64(half_bits)
    left, right = values >> bits, values & np.uint64((1 << half_bits) - 1)
    for key in keys:
        # The top bits of the mixed number: they depend on all bits below them.
        left, right = right, left ^ (_mix(right + key) >> np.uint64(64 - half_bits))
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def unigram_loss(train: Sequence[TokenSpan], validation: Sequence[TokenSpan], vocab: int) -> float:
    """Cross entropy, in nats per token, that a model without any context reaches on `validation`.

    It knows how often each of the `vocab` ids occurs in `train`, with one added to every count so that an
    unseen id costs a finite loss. A model that has learned something is below this. Reads both sides once.
    Raises ValueError if an id is outside the vocabulary or `validation` is empty.
    """
    if not num_tokens(validation):
        raise ValueError("the loss over no validation tokens is not defined")
    seen, asked = _counts(train, vocab), _counts(validation, vocab)
    log_probabilities = np.log(seen + 1.0) - math.log(float(seen.sum()) + vocab)
    return float(-(asked @ log_probabilities) / asked.sum())


def _counts(spans: Sequence[TokenSpan], vocab: int) -> NDArray[np.int64]:
    """How often each id occurs: [vocab]."""
    counts = np.zeros(vocab, np.int64)
    for span in spans:
        for ids in span.chunks():
            if ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(f"{span.path} has token ids {ids.min()} to {ids.max()}; vocabulary {vocab}")
            counts += np.bincount(ids, minlength=vocab)
    return counts
