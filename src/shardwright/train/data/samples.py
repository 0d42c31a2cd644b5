"""Samples from token files: windows of tokens, in an order that is a function of the seed and the sample's number.

It does not depend on ranks, world size or batch size, so a run that changes its plan sees the same samples.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.config.phrase import say
from shardwright.train.data.token_stream import TokenSpan, TokenStream, num_tokens


class SampleReader(Protocol):
    """An endless sequence of samples of `sequence` + 1 tokens. Its `len` is the number of samples in an epoch."""

    sequence: int

    def __len__(self) -> int: ...

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]."""


class Samples:
    """The windows of one side of the data, as an endless sequence of samples.

    Window w is tokens[w * sequence : (w + 1) * sequence + 1]: `sequence` inputs, and as targets the same shifted by
    one. Inputs don't overlap, and a tail shorter than a window is left out. Samples are numbered over the whole run:
    sample n is in epoch n // len(samples). Each epoch has every window once, in its own order (`shuffled`), or in file
    order if `shuffle` is false.

    `marks` are explained in token_stream.py.
    """

    def __init__(
        self, tokens: Sequence[TokenSpan], sequence: int, seed: int, shuffle: bool = True, marks: bool = False
    ) -> None:
        """Map the files. Raises ValueError if `tokens` are fewer than a window, OSError if a file is gone."""
        self.sequence = sequence
        self.seed = seed
        self.shuffle = shuffle
        self.num_tokens = num_tokens(tokens)
        self._num_windows = max(self.num_tokens - 1, 0) // sequence
        if not self._num_windows:
            raise ValueError(
                say(
                    "{num_tokens} tokens hold no window of {sequence} + 1 tokens",
                    num_tokens=self.num_tokens,
                    sequence=sequence,
                )
            )
        self._stream = TokenStream(tokens, marks)

    def __len__(self) -> int:
        """The number of windows, which is the number of samples in an epoch."""
        return self._num_windows

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]. May cross epochs. Raises ValueError
        if `first` or `count` is negative."""
        refuse_negative(first, count)
        rows = np.empty((count, self.sequence + 1), np.int64)
        windows = in_order(first, count, len(self), self.seed if self.shuffle else None)
        for row, window in zip(rows, windows.tolist(), strict=True):
            self._stream.read(window * self.sequence, row)
        return rows


def refuse_negative(first: int, count: int) -> None:
    """Raises ValueError if the number of the first sample, or their count, is negative."""
    if first < 0 or count < 0:
        raise ValueError(
            say("samples are counted from 0, and {count} from {first} on were asked for", count=count, first=first)
        )


def in_order(first: int, count: int, size: int, seed: int | None) -> NDArray[np.int64]:
    """The window of each of `count` samples from number `first` on: [count]. Each epoch has every one of `size` windows
    once, in its own order, or in file order if `seed` is None."""
    epochs, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), size)
    if seed is None:
        return positions
    windows = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        windows[in_epoch] = shuffled(positions[in_epoch], size, seed, epoch)
    return windows


def shuffled(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Apply a pseudo-random permutation of range(size) to `positions`: [n] to [n].

    The permutation is a function of (size, seed, epoch) and is never stored: it takes memory for `positions` alone, for
    10 windows or 10^12. It is a Feistel network (Luby and Rackoff 1988, "How to construct pseudorandom permutations
    from pseudorandom functions"): split a number of 2h bits in two halves and repeat
    (left, right) -> (right, left xor f(key, right)). For any f each round can be undone, so the network is a
    permutation of range(4^h). The smallest such range that holds `size` is taken, and a result outside of range(size)
    goes through the network again until it is inside: cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"). The walk follows a cycle of the larger permutation from an element inside, so it comes back
    inside, and no two walks meet. 4^h < 4 x size, so fewer than four passes are expected.

    Luby and Rackoff need 3 or 4 rounds of a true pseudo-random f. Here 8 rounds of a simple mixing function also
    scatter small ranges, whose halves have few bits. This is good for shuffling, not for cryptography.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(blake2b(f"{seed}:{epoch}".encode()).digest(), "<u8")  # 64 bytes: 8 rounds
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a permutation of range(4 ** half_bits) to `values` [n], with one round for each key."""
    bits = np.uint64(half_bits)
    left, right = values >> bits, values & np.uint64((1 << half_bits) - 1)
    for key in keys:
        # The top bits of the mixed number depend on all lower bits.
        left, right = right, left ^ (_mix(right + key) >> np.uint64(64 - half_bits))
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def token_shares(spans: Sequence[TokenSpan], vocab: int) -> NDArray[np.float64]:
    """The share of each id among the learned tokens, [vocab]. One is added to every count, so that an unseen id has a
    share, too. Reads the spans once. Raises ValueError if an id is outside the vocabulary."""
    counts = token_counts(spans, vocab) + 1.0
    return counts / counts.sum()


def token_counts(spans: Sequence[TokenSpan], vocab: int) -> NDArray[np.int64]:
    """The number of times that each id occurs among the learned tokens: [vocab]. Raises ValueError if an id is outside
    the vocabulary."""
    counts = np.zeros(vocab, np.int64)
    for span in spans:
        start = 0
        for ids in span.chunks():
            if ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(
                    say(
                        "{path} has token ids {least} to {most}; vocabulary {vocab}",
                        path=span.path,
                        least=ids.min(),
                        most=ids.max(),
                        vocab=vocab,
                    )
                )
            counts += np.bincount(ids[span.counted(start, start + len(ids))], minlength=vocab)
            start += len(ids)
    return counts
