"""Held-out samples in microbatches, each sample once, also if their number is no multiple of the microbatch size.

Full microbatches come first. Each of the remaining samples has a microbatch of its own, in which it is repeated: the
mean loss of copies is the loss of the sample. So microbatches need no filling, and samples weigh the same. Further
microbatches, up to the end of the last global batch, have weight 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.data.samples import SampleReader


class OnceEach:
    """The first `num_samples` samples of a set, as rows of global batches. It is a SampleReader of these rows.

    `weights` are the weights of microbatches, in the order of rows: [batches x microbatches of a global batch]. A full
    one has 1, one with copies of a single sample 1 / microbatch_size, and one after the last sample 0.
    """

    def __init__(self, samples: SampleReader, most_samples: int, microbatch_size: int, global_batch_size: int) -> None:
        """Take at most `most_samples` samples. `global_batch_size` is a multiple of `microbatch_size`."""
        self.sequence, self._samples = samples.sequence, samples
        self.num_samples = min(len(samples), most_samples)
        size, per_batch = microbatch_size, global_batch_size // microbatch_size
        num_full, num_single = divmod(self.num_samples, size)
        self.num_batches = -(-(num_full + num_single) // per_batch)
        num_unused = self.num_batches * per_batch - num_full - num_single
        full = np.arange(num_full * size, dtype=np.int64)
        single = np.repeat(np.arange(num_full * size, self.num_samples, dtype=np.int64), size)
        self._rows = np.concatenate((full, single, np.zeros(num_unused * size, np.int64)))
        self.weights = np.repeat((1.0, 1 / size, 0.0), (num_full, num_single, num_unused))

    def __len__(self) -> int:
        """The number of rows of all global batches."""
        return len(self._rows)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Rows first, first + 1, ..., first + count - 1: [count, sequence + 1]."""
        numbers = self._rows[first : first + count]
        rows = np.empty((len(numbers), self.sequence + 1), np.int64)
        if not len(numbers):
            return rows
        # Consecutive samples are read at once, and copies one by one.
        ends = np.flatnonzero(np.diff(numbers, append=numbers[-1]) != 1) + 1
        for start, end in zip(np.concatenate(([0], ends[:-1])).tolist(), ends.tolist(), strict=True):
            rows[start:end] = self._samples.batch(int(numbers[start]), end - start)
        return rows


class InTurn:
    """Held-out samples of several sources, each sample once. It is a SampleReader.

    While no source is exhausted, samples come in proportion to the weights, so that any first part is representative:
    samples are sorted by (k + 1/2) / w, for sample k of a source of weight w.
    """

    def __init__(self, sources: Sequence[SampleReader], weights: Sequence[float]) -> None:
        self.sequence, self._sources = sources[0].sequence, sources
        self._weights = np.array(weights, np.float64)
        # The source of each of the first samples, and the sample's number in that source.
        self._owners = self._numbers = np.empty(0, np.int64)

    def __len__(self) -> int:
        """The number of samples of all sources."""
        return sum(map(len, self._sources))

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]."""
        self._put_in_order(min(first + count, len(self)))
        owners, numbers = self._owners[first : first + count], self._numbers[first : first + count]
        rows = np.empty((len(owners), self.sequence + 1), np.int64)
        for owner in np.unique(owners).tolist():
            is_owned = owners == owner
            # The numbers of a source's samples are consecutive.
            rows[is_owned] = self._sources[owner].batch(int(numbers[is_owned][0]), int(is_owned.sum()))
        return rows

    def _put_in_order(self, num_samples: int) -> None:
        """Compute the order of at least the first `num_samples` samples."""
        if num_samples <= len(self._owners):
            return
        num_samples = min(max(num_samples, 2 * len(self._owners)), len(self))
        # At most the first `num_samples` samples of each source are among them.
        candidates = [min(len(source), num_samples) for source in self._sources]
        numbers = np.concatenate([np.arange(n, dtype=np.int64) for n in candidates])
        owners = np.repeat(np.arange(len(candidates)), candidates)
        order = np.argsort((numbers + 0.5) / self._weights[owners], kind="stable")[:num_samples]
        self._owners, self._numbers = owners[order], numbers[order]


def counted_targets(rows: NDArray[np.int64], marks: bool) -> NDArray[np.int64]:
    """The target ids of samples [B, S + 1] that have a loss: [n]. With `marks` (sharding/token_marks.py), targets that
    begin a document or are marked as uncounted have none."""
    targets = rows[:, 1:]
    return targets[(targets >= 0) & (targets & UNCOUNTED == 0)] if marks else targets.reshape(-1)


def unigram_loss(shares: NDArray[np.float64], samples: SampleReader, most_samples: int, marks: bool) -> float | None:
    """Cross entropy, in nats per token, of a unigram model with the probabilities `shares`, [vocab], on the targets of
    the first `most_samples` samples, each once. None if no target has a loss.

    A model that has learned something has a lower loss.
    """
    counts = np.zeros(len(shares), np.int64)
    num_samples = min(len(samples), most_samples)
    for first in range(0, num_samples, _ROWS):
        rows = samples.batch(first, min(_ROWS, num_samples - first))
        counts += np.bincount(counted_targets(rows, marks), minlength=len(shares))
    total = int(counts.sum())
    return float(-(counts @ np.log(shares)) / total) if total else None


_ROWS = 64  # samples that are read at once
