"""The compressed reduction of one bucket of gradients.

Large tensors are reduced by a compression method. Tensors that are too small, or whose shape the method does not
support, are reduced uncompressed, together in one all-reduce.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pkgutil import resolve_name

import torch
from torch import Tensor

from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.collectives import Axis, Pending
from shardwright.parallel.compress.bucket import Bucket, ErrorKind, ErrorSpan
from shardwright.parallel.compress.wire import Wire, pack, sent_bytes, unpack
from shardwright.sharding.compression import is_compressed
from shardwright.sharding.parameter_shard import ParameterShard


class Method(ABC):
    """A method that sums large tensors over an axis of two or more ranks. Its sums yield each collective that they must
    wait for.

    By default a method sums the whole bucket even if only a share of it is needed, and has no state.
    """

    has_warm_starts = False

    def error_kinds(self, is_scattered: bool) -> tuple[ErrorKind, ...]:
        """The kinds of error-feedback residuals (ErrorKind in bucket.py) that it keeps for a bucket, which is
        reduce-scattered or all-reduced; the same on every rank."""
        return ()

    @abstractmethod
    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """Overwrite the tensors with their sums, the same bits on every rank."""

    def scatter_over(self, flat: Tensor, tensors: list[Tensor], out: Tensor, wire: Wire) -> Iterator[Pending]:
        """Put this rank's share of the sum of `flat` into `out`. Shapes [d * L] and [L]; `tensors` are views of
        `flat`, which may be overwritten."""
        yield from self.sum_over(tensors, wire)
        out.copy_(flat.view(wire.axis.size, -1)[wire.axis.index])

    def state_tensors(self) -> list[Tensor]:
        """The tensors that the method keeps for the next step."""
        return []

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The errors that the method will add to the next gradients of a bucket: views, zeros before the first step. An
        element's errors, summed over all ranks and kinds, are the part of its gradients that has not been applied."""
        return iter(())

    def warm_starts(self) -> Sequence[Tensor | None]:
        """For each tensor the tensor from which the next approximation of its gradient starts (PowerSGD's Q), the same
        on every rank; None for a tensor without one, and an empty sequence if no tensor has one."""
        return []

    def start_from(self, starts: list[Tensor | None]) -> None:
        """Continue from warm starts, one for each tensor; a tensor with None begins without one."""
        assert not self.has_warm_starts, "a method with warm starts must override start_from"


class Reduction:
    """A reduction under way; it is used like a `Pending` collective.

    `steps` yields each collective when the next computation needs its result. Collectives before the first yield are
    started at once, later ones by `advance` and `wait`. So ranks must start, advance and await their reductions on one
    axis in the same order. If all of them are advanced before the first one is awaited, their collectives overlap.
    """

    def __init__(self, steps: Iterator[Pending]) -> None:
        self._steps = steps
        self._pending = next(steps, None)

    def is_over(self) -> bool:
        """True if nothing is left to do or to wait for. Does not block."""
        return self._pending is None

    def advance(self) -> None:
        """Wait for the collective under way, compute with its result, and start the next one."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = next(self._steps, None)

    def wait(self) -> None:
        """Block until the result may be used."""
        while self._pending is not None:
            self.advance()


class Compressor:
    """Sums one bucket over the replicas, approximately. Each bucket has its own Compressor, which keeps the bucket's
    errors.

    `compressed_indices` are the indices of the compressed tensors (sharding/compression.py). `bytes_saved` is the bytes
    on the wire of an uncompressed reduction, for all ranks of the axis together, minus those of this one (see wire.py).
    It is negative if the method sends more.
    """

    def __init__(self, method: Method, compressed_indices: Sequence[int]) -> None:
        self.method, self.compressed_indices = method, compressed_indices
        self.bytes_saved = 0

    def start(self, flat: Tensor, tensors: list[Tensor], axis: Axis) -> Reduction:
        """Sum `flat` [n] in place. `tensors` are views of it, one for each parameter, in the parameter's shape.

        After `wait` each tensor holds the sum over the axis, the same bits on every rank. Elements that no tensor
        covers (padding) keep their values. On an axis of one rank nothing changes.
        """
        return Reduction(self._sum(flat, tensors, axis))

    def start_scatter(self, flat: Tensor, tensors: list[Tensor], axis: Axis, out: Tensor) -> Reduction:
        """Put this rank's share of the sum of `flat` into `out`. Shapes [d * L] and [L].

        Elements that no tensor covers (padding) should be zeros. After `wait` the contents of `flat` are undefined, and
        so is padding in `out`. A method that needs whole tensors (PowerSGD, top-k) sums them on every rank, with the
        bytes of `start`.
        """
        return Reduction(self._scatter(flat, tensors, axis, out))

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The errors of the method for the tensors of a bucket, as views of its memory."""
        if bucket.num_ranks > 1 and self.compressed_indices:
            for span in self.method.errors(bucket.only(self.compressed_indices), device):
                yield replace(span, number=self.compressed_indices[span.number])

    def rescale_errors(self, bucket: Bucket, device: torch.device, factor: float) -> None:
        """Multiply the errors, which have the scale of the gradients that they are added to next."""
        for span in self.errors(bucket, device):
            span.values.mul_(factor)

    def _sum(self, flat: Tensor, tensors: list[Tensor], axis: Axis) -> Iterator[Pending]:
        if axis.size == 1:
            return
        wire = Wire(axis)
        large, small = self._split(tensors)
        uncompressed = _UncompressedSum(small, wire)
        if large:
            yield from self.method.sum_over(large, wire)
        yield from uncompressed.finish()
        self.bytes_saved += sent_bytes("all_reduce", flat, axis) - wire.num_bytes

    def _scatter(self, flat: Tensor, tensors: list[Tensor], axis: Axis, out: Tensor) -> Iterator[Pending]:
        if axis.size == 1:
            out.copy_(flat)
            return
        wire = Wire(axis)
        large, small = self._split(tensors)
        uncompressed = _UncompressedSum(small, wire)
        for tensor in small:
            tensor.zero_()  # it is reduced separately, and must not affect the scale of its neighbours
        if large:
            yield from self.method.scatter_over(flat, large, out, wire)
        yield from uncompressed.finish()
        begin, end = axis.index * out.numel(), (axis.index + 1) * out.numel()
        for tensor in small:
            offset = tensor.storage_offset() - flat.storage_offset()
            first, last = max(offset, begin), min(offset + tensor.numel(), end)
            if first < last:
                out[first - begin : last - begin] = flat[first:last]
        self.bytes_saved += sent_bytes("reduce_scatter", flat, axis) - wire.num_bytes

    def _split(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The compressed tensors, and the others."""
        compressed = set(self.compressed_indices)
        return [tensors[i] for i in self.compressed_indices], [t for i, t in enumerate(tensors) if i not in compressed]


class _UncompressedSum:
    """The uncompressed sum of tensors in one all-reduce, which begins at once."""

    def __init__(self, tensors: list[Tensor], wire: Wire) -> None:
        self._tensors = tensors
        if tensors:
            self._packed = pack(tensors, tensors[0].dtype)
            self._pending = wire.all_reduce(self._packed)

    def finish(self) -> Iterator[Pending]:
        if self._tensors:
            yield self._pending
            unpack(self._packed, self._tensors)


# Makes the compressor of a bucket of tensors with these places.
MakeCompressor = Callable[[Sequence[ParameterShard]], Compressor]


def make_compressor(plan: PlanSpec) -> MakeCompressor | None:
    """A function that makes the compressor of a bucket; None if gradients are not compressed."""
    facts = COMPRESSIONS[plan.compress]
    if not facts.method:
        return None
    method: Callable[[PlanSpec], Method] = resolve_name(facts.method)

    def make(places: Sequence[ParameterShard]) -> Compressor:
        return Compressor(method(plan), [number for number, place in enumerate(places) if is_compressed(plan, place)])

    return make
