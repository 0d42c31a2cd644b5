"""The layout of the tensors of a bucket in memory, which maps a compressor's errors to elements of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

# "lost": the error of this rank's own gradients, which it did not send. "served": its error of the sums that it sent
# on.
ErrorKind = Literal["lost", "served"]


@dataclass(frozen=True)
class Bucket:
    """Tensors in a flat buffer of `size` elements, including padding. `offsets` are the indices of their first
    elements, `lengths` their numbers of elements. This rank is number `index` of `num_ranks`. Each rank gets the whole
    sum, or, if it `is_scattered`, a share of it."""

    size: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    num_ranks: int
    index: int
    is_scattered: bool

    @property
    def num_elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(self.lengths)

    @property
    def share(self) -> int:
        """The number of elements of a rank's share of the buffer."""
        return self.size // self.num_ranks

    def only(self, numbers: Sequence[int]) -> "Bucket":
        """This buffer with only some of its tensors."""
        offsets, lengths = (tuple(values[i] for i in numbers) for values in (self.offsets, self.lengths))
        return replace(self, offsets=offsets, lengths=lengths)

    def packed(self) -> "Bucket":
        """The tensors side by side, without padding."""
        offsets = tuple(sum(self.lengths[:i]) for i in range(len(self.lengths)))
        return replace(self, size=self.num_elements, offsets=offsets)


@dataclass(frozen=True)
class ErrorSpan:
    """The errors of neighbouring elements of tensor `number` of a bucket, from its element `first` on: a view [n]."""

    kind: ErrorKind
    number: int
    first: int
    values: Tensor


def error_spans(kind: ErrorKind, bucket: Bucket, start: int, values: Tensor) -> Iterator[ErrorSpan]:
    """The spans in `values` [n], the errors of the buffer's elements from `start` on. Padding is in no span."""
    end = start + values.numel()
    for number, (offset, length) in enumerate(zip(bucket.offsets, bucket.lengths, strict=True)):
        first, last = max(start, offset), min(end, offset + length)
        if first < last:
            yield ErrorSpan(kind, number, first - offset, values[first - start : last - start])
