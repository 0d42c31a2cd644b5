"""Batches that are read while the one before is computed with.

A batch may lie on a disk or behind a network that is slow. One thread of each rank reads the next one, packs it and
copies it to the device. It is asked for one batch at a time, so that what is read is a function of what was asked for,
and one that is not wanted, after a rewind, is dropped. Where a run stands in its data is what its steps have consumed:
what was read ahead is no part of it.
"""

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.device_streams import Event
from shardwright.train.data.samples import SampleReader

# What went wrong is not to be kept back by a disk that gives no answer: the thread ends with the process then.
_PATIENCE_S = 5.0


def my_share(samples: SampleReader, consumed: int, job: JobSpec, mesh: Mesh) -> Tensor:
    """This replica's samples of the full global batch that begins after `consumed` samples, [B, S + 1]."""
    return _on_host(samples, consumed, job.batch.global_batch_size // job.plan.dp, mesh).to(mesh.device)


def _on_host(samples: SampleReader, consumed: int, share: int, mesh: Mesh) -> Tensor:
    return torch.from_numpy(samples.batch(consumed + mesh.dp.index * share, share))


@dataclass(frozen=True)
class BatchPlace:
    """Where a batch lies: behind so many samples, of which a replica has a `share`."""

    consumed: int
    share: int


@dataclass(frozen=True)
class TokenBatch:
    """Tokens on the device; on CUDA they are there once the copy is over."""

    tokens_BS: Tensor
    copied: Event | None = None


class BatchReader:
    """This replica's part of global batches, one after the other. Close it, or use it in a `with`: it has a thread."""

    def __init__(self, samples: SampleReader, job: JobSpec, mesh: Mesh, num_batches: int) -> None:
        """Nothing is read beyond `num_batches`, which are counted from 0 and as large as steps of those numbers are."""
        self._samples, self._job, self._mesh, self._num_batches = samples, job, mesh, num_batches
        self._stream = mesh.streams.made() if mesh.streams else None
        self._asked: SimpleQueue[BatchPlace | None] = SimpleQueue()
        self._read: SimpleQueue[TokenBatch | Exception] = SimpleQueue()
        self._ahead: BatchPlace | None = None  # of the batch that is being read, or was, and nobody has taken
        self._taken: tuple[BatchPlace, Tensor] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_PATIENCE_S if kind is not None else None)

    def batch(self, number: int, consumed: int) -> Tensor:
        """The batch that begins after `consumed` samples, [B, S + 1]; the same again, where it is asked for again.

        The one behind it is read from now on, unless this is the last one by its number. What reading raised, this
        raises, once that batch is asked for.
        """
        place = self._place(number, consumed)
        if self._taken is not None and self._taken[0] == place:
            return self._taken[1]
        self._taken = None
        if self._ahead != place:
            self._drop()
            self._ask(place)
        found = self._read.get()
        self._ahead = None
        if isinstance(found, Exception):
            raise found
        if number + 1 < self._num_batches:
            self._ask(self._place(number + 1, consumed + self._job.batch.size_at(number)))
        streams = self._mesh.streams
        if streams is not None and found.copied is not None:
            here = streams.current()
            here.wait_event(found.copied)
            streams.lend(found.tokens_BS, here)
        self._taken = place, found.tokens_BS
        return found.tokens_BS

    def close(self, most_s: float | None = None) -> None:
        """End the thread, once it has read what it is at, or wait for that so long."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(most_s)
            self._thread, self._ahead, self._taken = None, None, None

    def _place(self, number: int, consumed: int) -> BatchPlace:
        return BatchPlace(consumed, self._job.batch.size_at(number) // self._job.plan.dp)

    def _ask(self, place: BatchPlace) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
            self._thread.start()
        self._ahead = place
        self._asked.put(place)

    def _drop(self) -> None:
        if self._ahead is not None:
            self._read.get()
            self._ahead = None

    def _run(self) -> None:
        while (place := self._asked.get()) is not None:
            try:
                self._read.put(self._fetch(place))
            except Exception as error:
                self._read.put(error)

    def _fetch(self, place: BatchPlace) -> TokenBatch:
        tokens_BS = _on_host(self._samples, place.consumed, place.share, self._mesh)
        streams = self._mesh.streams
        if streams is None or self._stream is None:
            return TokenBatch(tokens_BS.to(self._mesh.device))
        with streams.using(self._stream):  # beside the stream that computes: neither waits for the other
            return TokenBatch(streams.brought(tokens_BS), self._stream.record_event())
