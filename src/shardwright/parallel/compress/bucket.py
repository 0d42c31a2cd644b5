"""The tensors of a bucket in memory, and error feedback: the error of a compression is added to the next gradient.

Seide et al. 2014 (Interspeech, "1-bit stochastic gradient descent"). Karimireddy et al. 2019 (arXiv 1901.09847,
algorithm 2) show that compressed SGD then converges at the rate of plain SGD. The sum of all sent gradients differs
from the sum of all gradients only by the error of the last step. If a run scales its gradients, its errors are scaled
too, and change with the scale. The layout of a bucket maps errors to elements of tensors, so that another plan can take
them up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
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


class ErrorFeedback:
    """The error of one compression of one rank in the last step, float32. `lost` is None before the first step."""

    def __init__(self) -> None:
        self.lost: Tensor | None = None

    def add_to(self, gradient: Tensor) -> None:
        """Add the error to a gradient in place, before it is compressed. Every step must have the same shape."""
        if self.lost is not None:
            gradient += self.lost

    def keep(self, lost: Tensor) -> None:
        """Keep the error of this step. The tensor is overwritten, and belongs to this object.

        If a gradient is not finite its step is skipped anyway. The error must not carry that to the next step.
        """
        self.lost = torch.nan_to_num_(lost, nan=0.0, posinf=0.0, neginf=0.0)

    def state_tensors(self) -> list[Tensor]:
        """The error, if there is one."""
        return [] if self.lost is None else [self.lost]

    def lost_or_zeros(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The error of a gradient of this shape, which is set to zeros before the first step. Values written to it are
        added to the next gradient."""
        if self.lost is None:
            self.lost = torch.zeros(shape, dtype=torch.float32, device=device)
        assert self.lost.shape == shape, f"errors of {list(self.lost.shape)} are not those of {list(shape)}"
        return self.lost
