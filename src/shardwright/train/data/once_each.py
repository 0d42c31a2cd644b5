"""Held-out samples in microbatches, each sample once: also where their number is no multiple of a microbatch.

As many microbatches as there can be are full. Of the samples that are left, fewer than a microbatch, each has one of
its own, in which it is repeated: the mean over a microbatch of copies is that of the one. So nothing is made up to fill
microbatches with, and no sample weighs more than another. Microbatches behind these, up to the end of the last global
batch, count for nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.data.samples import SampleReader


class OnceEach:
    """The first `num_samples` samples of a set, laid out in rows of global batches: a SampleReader of these rows.

    `weights` says how much of each microbatch counts: 1 of a full one, 1 / microbatch_size of one with copies of a
    single sample, and 0 of one behind the last. [batches x microbatches of a global batch], in the order of the rows.
    """

    def __init__(self, samples: SampleReader, most_samples: int, microbatch_size: int, global_batch_size: int) -> None:
        """At most so many samples. A global batch is a whole number of microbatches, over all replicas."""
        self.sequence, self._samples = samples.sequence, samples
        self.num_samples = min(len(samples), most_samples)
        size, per_batch = microbatch_size, global_batch_size // microbatch_size
        num_full, num_single = divmod(self.num_samples, size)
        self.num_batches = -(-(num_full + num_single) // per_batch)
        num_behind = self.num_batches * per_batch - num_full - num_single
        full = np.arange(num_full * size, dtype=np.int64)
        single = np.repeat(np.arange(num_full * size, self.num_samples, dtype=np.int64), size)
        self._rows = np.concatenate((full, single, np.zeros(num_behind * size, np.int64)))
        self.weights = np.repeat((1.0, 1 / size, 0.0), (num_full, num_single, num_behind))

    def __len__(self) -> int:
        """Rows, of all global batches."""
        return len(self._rows)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Rows first, first + 1, ..., first + count - 1: [count, sequence + 1]."""
        wanted = self._rows[first : first + count]
        rows = np.empty((len(wanted), self.sequence + 1), np.int64)
        if not len(wanted):
            return rows
        # Runs of neighbours are read at once, and copies one by one.
        ends = np.flatnonzero(np.diff(wanted, append=wanted[-1]) != 1) + 1
        for start, end in zip(np.concatenate(([0], ends[:-1])).tolist(), ends.tolist(), strict=True):
            rows[start:end] = self._samples.batch(int(wanted[start]), end - start)
        return rows


class InTurn:
    """Held-out samples of several sources, each sample once: a SampleReader.

    While all sources have some left, they come in proportion to the weights, so that a part of the whole is a fair one:
    sample k of a source of weight w stands at the place (k + 1/2) / w of the order.
    """

    def __init__(self, sources: Sequence[SampleReader], weights: Sequence[float]) -> None:
        self.sequence, self._sources = sources[0].sequence, sources
        self._weights = np.array(weights, np.float64)
        self._owners = self._numbers = np.empty(
            0, np.int64
        )  # of the first samples: whose each is, and its number there

    def __len__(self) -> int:
        """Samples of all sources."""
        return sum(map(len, self._sources))

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]."""
        self._put_in_order(min(first + count, len(self)))
        owners, numbers = self._owners[first : first + count], self._numbers[first : first + count]
        rows = np.empty((len(owners), self.sequence + 1), np.int64)
        for owner in np.unique(owners).tolist():
            here = owners == owner
            # A source's own samples follow each other without a gap.
            rows[here] = self._sources[owner].batch(int(numbers[here][0]), int(here.sum()))
        return rows

    def _put_in_order(self, num_samples: int) -> None:
        """Know the order of the first so many samples, and of some behind them."""
        if num_samples <= len(self._owners):
            return
        num_samples = min(max(num_samples, 2 * len(self._owners)), len(self))
        # None of a later number in its source is among the first so many.
        held = [min(len(source), num_samples) for source in self._sources]
        numbers = np.concatenate([np.arange(n, dtype=np.int64) for n in held])
        owners = np.repeat(np.arange(len(held)), held)
        order = np.argsort((numbers + 0.5) / self._weights[owners], kind="stable")[:num_samples]
        self._owners, self._numbers = owners[order], numbers[order]


def counted_targets(rows: NDArray[np.int64], marks: bool) -> NDArray[np.int64]:
    """The ids of the targets of samples [B, S + 1] that have a loss, one after the other: with `marks`
    (sharding/token_marks.py), those that neither begin a document nor are marked as uncounted."""
    targets = rows[:, 1:]
    return targets[(targets >= 0) & (targets & UNCOUNTED == 0)] if marks else targets.reshape(-1)


def unigram_loss(shares: NDArray[np.float64], samples: SampleReader, most_samples: int, marks: bool) -> float | None:
    """Cross entropy, in nats a token, of a model that knows no context but which `shares` of all tokens each id has,
    [vocab], over the targets of the first samples, each once. None where none of these has a loss.

    A model that has learned something is below this.
    """
    counts = np.zeros(len(shares), np.int64)
    num_samples = min(len(samples), most_samples)
    for first in range(0, num_samples, _ROWS):
        rows = samples.batch(first, min(_ROWS, num_samples - first))
        counts += np.bincount(counted_targets(rows, marks), minlength=len(shares))
    total = int(counts.sum())
    return float(-(counts @ np.log(shares)) / total) if total else None


_ROWS = 64  # that are read at a time
