"""How the tensors of a bucket lie in memory, and so of which elements the errors of a compressor are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

# What this rank did not send of its own gradients, and what it lost of the sums that it sent on.
ErrorKind = Literal["lost", "served"]


@dataclass(frozen=True)
class Bucket:
    """Tensors in a flat buffer of `size` elements, padding included: the number of each one's first element, and how
    many it has. This rank is the one with number `index` of `num_ranks`, each of which is left with the whole sum, or
    with a share of it if it `is_scattered`."""

    size: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    num_ranks: int
    index: int
    is_scattered: bool

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(self.lengths)

    @property
    def share(self) -> int:
        """Elements of a rank's share of the buffer."""
        return self.size // self.num_ranks

    def only(self, numbers: Sequence[int]) -> "Bucket":
        """This buffer, of whose tensors only some are looked at."""
        offsets, lengths = (tuple(of[i] for i in numbers) for of in (self.offsets, self.lengths))
        return replace(self, offsets=offsets, lengths=lengths)

    def packed(self) -> "Bucket":
        """The tensors side by side, without padding."""
        offsets = tuple(sum(self.lengths[:i]) for i in range(len(self.lengths)))
        return replace(self, size=self.num_elements, offsets=offsets)


@dataclass(frozen=True)
class ErrorSpan:
    """The errors of neighbouring elements of the tensor with a number, from its element `first` on: a view [n]."""

    kind: ErrorKind
    number: int
    first: int
    values: Tensor


def error_spans(kind: ErrorKind, bucket: Bucket, start: int, values: Tensor) -> Iterator[ErrorSpan]:
    """The spans in `values` [n], which are of the elements of the buffer from `start` on. Padding is in none."""
    end = start + values.numel()
    for number, (offset, length) in enumerate(zip(bucket.offsets, bucket.lengths, strict=True)):
        first, last = max(start, offset), min(end, offset + length)
        if first < last:
            yield ErrorSpan(kind, number, first - offset, values[first - start : last - start])
