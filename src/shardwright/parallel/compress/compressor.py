"""The reduction of one bucket of gradients in fewer bytes.

Large tensors go by a method; those that are too small, or whose shape the method does not take, travel as they are,
together in one all-reduce.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, Pending
from shardwright.parallel.compress.bucket import Bucket, ErrorKind, ErrorSpan
from shardwright.parallel.compress.pack import pack, unpack
from shardwright.parallel.compress.reduction import Reduction
from shardwright.parallel.compress.wire import Wire, sent_bytes


class Method(ABC):
    """How large tensors are summed over an axis of two or more ranks. Yields each collective it has to wait for.

    Where a method says nothing else it sums the whole bucket, of which a share is kept, and has no state.
    """

    has_warm_starts = False

    def error_kinds(self, is_scattered: bool) -> tuple[ErrorKind, ...]:
        """The kinds of errors that it keeps, of a bucket whose sum is left in shares or not; on every rank the same."""
        return ()

    @abstractmethod
    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """Overwrite the tensors with their sums, the same bits on every rank."""

    def scatter_over(self, flat: Tensor, tensors: list[Tensor], out: Tensor, wire: Wire) -> Iterator[Pending]:
        """Put this rank's share of the sum of `flat` into `out`. Shapes [d * L] and [L]; `flat` may be used up."""
        yield from self.sum_over(tensors, wire)
        out.copy_(flat.view(wire.axis.size, -1)[wire.axis.index])

    def memory(self) -> list[Tensor]:
        """The tensors that it keeps for the next step."""
        return []

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The errors that the method adds to the next gradients, for a bucket of the given tensors: views, zeros before
        the first step. The sum over all ranks and kinds is what an element still lacks."""
        return iter(())

    def warm_starts(self) -> Sequence[Tensor | None]:
        """The start of the next step, by tensor, the same on every rank. None of what starts afresh; empty where all
        does."""
        return []

    def start_from(self, found: list[Tensor | None]) -> None:
        """Go on from warm starts; where one is None, from a fresh one."""
        assert not self.has_warm_starts, "whoever has them takes them up"


class Compressor:
    """Sums one bucket over the replicas, approximately; one object a bucket, for it keeps what was lost.

    `large` are the numbers of the tensors that are compressed (sharding/compression.py). `bytes_saved` is what an
    uncompressed reduction would have put on the wire, all ranks of the axis together, minus what was put (see wire.py).
    It is negative where the method sends more.
    """

    def __init__(self, method: Method, large: Sequence[int]) -> None:
        self.method, self.large = method, large
        self.bytes_saved = 0

    def start(self, flat: Tensor, tensors: list[Tensor], axis: Axis) -> Reduction:
        """Sum `flat` [n] in place. `tensors` are views of it, one a parameter, in the parameter's shape.

        After `wait` each tensor holds the sum over the axis, the same bits on every rank. Elements that no tensor
        covers (padding) keep their values. On an axis of one rank nothing happens.
        """
        return Reduction(self._sum(flat, tensors, axis))

    def start_scatter(self, flat: Tensor, tensors: list[Tensor], axis: Axis, out: Tensor) -> Reduction:
        """Put this rank's share of the sum of `flat` into `out`. Shapes [d * L] and [L].

        Elements that no tensor covers (padding) should be zeros. After `wait` the contents of `flat` are undefined, and
        so is the padding's share of `out`. Where a method works on whole tensors (PowerSGD, top-k) it sums them on
        every rank, at the wire cost of `start`.
        """
        return Reduction(self._scatter(flat, tensors, axis, out))

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The errors of the method for the tensors of a bucket, as views of its memory."""
        if bucket.num_ranks > 1 and self.large:
            for span in self.method.errors(bucket.only(self.large), device):
                yield replace(span, number=self.large[span.number])

    def _sum(self, flat: Tensor, tensors: list[Tensor], axis: Axis) -> Iterator[Pending]:
        if axis.size == 1:
            return
        wire = Wire(axis)
        large, small = self._split(tensors)
        rest = _Rest(small, wire)
        if large:
            yield from self.method.sum_over(large, wire)
        yield from rest.finish()
        self.bytes_saved += sent_bytes("all_reduce", flat, axis) - wire.num_bytes

    def _scatter(self, flat: Tensor, tensors: list[Tensor], axis: Axis, out: Tensor) -> Iterator[Pending]:
        if axis.size == 1:
            out.copy_(flat)
            return
        wire = Wire(axis)
        large, small = self._split(tensors)
        rest = _Rest(small, wire)
        for tensor in small:
            tensor.zero_()  # it travels apart, and must not spoil the scale of its neighbours
        if large:
            yield from self.method.scatter_over(flat, large, out, wire)
        yield from rest.finish()
        begin, end = axis.index * out.numel(), (axis.index + 1) * out.numel()
        for tensor in small:
            offset = tensor.storage_offset() - flat.storage_offset()
            first, last = max(offset, begin), min(offset + tensor.numel(), end)
            if first < last:
                out[first - begin : last - begin] = flat[first:last]
        self.bytes_saved += sent_bytes("reduce_scatter", flat, axis) - wire.num_bytes

    def _split(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(tensors that are compressed, tensors that are not)."""
        large = set(self.large)
        return [tensors[i] for i in self.large], [t for i, t in enumerate(tensors) if i not in large]


class _Rest:
    """Tensors that travel as they are, on their way from the beginning."""

    def __init__(self, tensors: list[Tensor], wire: Wire) -> None:
        self._tensors = tensors
        if tensors:
            self._packed = pack(tensors, tensors[0].dtype)
            self._pending = wire.all_reduce(self._packed)

    def finish(self) -> Iterator[Pending]:
        if self._tensors:
            yield self._pending
            unpack(self._packed, self._tensors)
