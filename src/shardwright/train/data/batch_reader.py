"""Reads the next batch while the current one is computed.

A batch may come from a slow disk or network. One thread of each rank reads the next batch, packs it, and copies it to
the device. It gets one request at a time, so the batches that are read follow from the requests; a batch that is not
needed, after a rewind, is dropped. The position of a run in its data counts the samples that steps have consumed, not
those read ahead.
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

# How long an exception may wait for the thread, which a disk without an answer blocks; it then ends with the process.
_PATIENCE_S = 5.0


def my_share(samples: SampleReader, consumed: int, job: JobSpec, mesh: Mesh) -> Tensor:
    """This replica's samples of the full global batch that begins after `consumed` samples, [B, S + 1]."""
    return _on_host(samples, consumed, job.batch.global_batch_size // job.plan.dp, mesh).to(mesh.device)


def _on_host(samples: SampleReader, consumed: int, share: int, mesh: Mesh) -> Tensor:
    return torch.from_numpy(samples.batch(consumed + mesh.dp.index * share, share))


@dataclass(frozen=True)
class BatchPlace:
    """The place of a batch: it begins after `consumed` samples, and each replica has `share` samples of it."""

    consumed: int
    share: int


@dataclass(frozen=True)
class TokenBatch:
    """Tokens on the device; on CUDA they are valid once the event `copied` has happened."""

    tokens_BS: Tensor
    copied: Event | None = None


class BatchReader:
    """Reads this replica's part of global batches, one after the other. It has a thread, so close it, or use it in a
    `with` statement."""

    def __init__(self, samples: SampleReader, job: JobSpec, mesh: Mesh, num_batches: int) -> None:
        """Batches have numbers from 0 to `num_batches` - 1, and the size of the step with that number."""
        self._samples, self._job, self._mesh, self._num_batches = samples, job, mesh, num_batches
        self._stream = mesh.streams.made() if mesh.streams else None
        self._asked: SimpleQueue[BatchPlace | None] = SimpleQueue()
        self._read: SimpleQueue[TokenBatch | Exception] = SimpleQueue()
        self._ahead: BatchPlace | None = None  # the batch that was requested and not taken yet
        self._taken: tuple[BatchPlace, Tensor] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_PATIENCE_S if kind is not None else None)

    def batch(self, number: int, consumed: int) -> Tensor:
        """Batch `number`, which begins after `consumed` samples: [B, S + 1]. A repeated call returns the same tensor.

        Starts to read the next batch, unless `number` is the last. Raises the exception that reading this batch raised.
        """
        place = self._place(number, consumed)
        if self._taken is not None and self._taken[0] == place:
            return self._taken[1]
        self._taken = None
        if self._ahead != place:
            self._drop()
            self._ask(place)
        result = self._read.get()
        self._ahead = None
        if isinstance(result, Exception):
            raise result
        if number + 1 < self._num_batches:
            self._ask(self._place(number + 1, consumed + self._job.batch.size_at(number)))
        streams = self._mesh.streams
        if streams is not None and result.copied is not None:
            current = streams.current()
            current.wait_event(result.copied)
            streams.lend(result.tokens_BS, current)
        self._taken = place, result.tokens_BS
        return result.tokens_BS

    def close(self, most_s: float | None = None) -> None:
        """End the thread after its current batch. Waits for it, at most `most_s` seconds."""
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
        with streams.using(self._stream):  # a separate stream: the copy and the computation do not wait for each other
            return TokenBatch(streams.brought(tokens_BS), self._stream.record_event())
