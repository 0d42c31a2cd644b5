"""The place of a released checkpoint's tensor in one of our tensors.

The same description is used in both directions: to load, and to export.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.sharding.parameter_shard import Box


@dataclass(frozen=True)
class ReleasedPiece:
    """A released tensor, `name` of `shape`, which fills the `region` of one of our tensors.

    The released tensor, viewed as `view` with its dims permuted to `order`, is the region. `interleaved` counts the
    elements at the beginning of dim `pairs_dim` of the region that are pairs (2i, 2i + 1) in the released tensor and
    (i, i + D/2) in ours. `plus` is added to the released values: norms of Gemma are 1 + weight. If the released tensor
    holds several of our regions, `cut_range` is the range of its dim `cut_dim` that is this region; the view is of that
    part. If the released table `may_be_longer`, only its first rows are taken.
    """

    name: str
    shape: tuple[int, ...]
    region: Box
    view: tuple[int, ...]
    order: tuple[int, ...]
    interleaved: int = 0
    pairs_dim: int = 0
    plus: float = 0.0
    cut_dim: int = 0
    cut_range: tuple[int, int] | None = None
    may_be_longer: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a released tensor has the shape: a table of learned positions may have more positions."""
        return shape == self.shape or (
            self.may_be_longer and shape[1:] == self.shape[1:] and len(shape) > 0 and shape[0] > self.shape[0]
        )

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part of the released tensor that fills the region."""
        if self.cut_range is None:
            return self.shape
        first, end = self.cut_range
        return tuple(end - first if dim == self.cut_dim else size for dim, size in enumerate(self.shape))

    def __post_init__(self) -> None:
        assert math.prod(self.part_shape) == math.prod(self.view), (
            f"{self.name}: {self.shape} is not seen as {self.view}"
        )
        ordered_sizes = tuple(self.view[dim] for dim in self.order)
        sizes = tuple(stop - start for start, stop in self.region)
        assert ordered_sizes == sizes, f"{self.name}: {ordered_sizes} does not fill {sizes}"


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def plain(name: str, shape: Sequence[int], plus: float = 0.0) -> ReleasedPiece:
    """A released tensor that is equal to ours."""
    return seen_as(name, shape, shape, plus=plus)


def seen_as(name: str, released_shape: Sequence[int], model_shape: Sequence[int], plus: float = 0.0) -> ReleasedPiece:
    """A released tensor that is ours with its dims split or joined."""
    shape = tuple(model_shape)
    return ReleasedPiece(name, tuple(released_shape), whole(shape), shape, tuple(range(len(shape))), plus=plus)


def transposed(name: str, shape: Sequence[int]) -> ReleasedPiece:
    """A released matrix that is the transpose of our [outputs, inputs]."""
    outputs, inputs = shape
    return ReleasedPiece(name, (inputs, outputs), whole(shape), (inputs, outputs), (1, 0))


def rows(name: str, shape: Sequence[int], start: int, end: int) -> ReleasedPiece:
    """A released tensor that is the rows [first, end) of ours; `shape` is our full shape."""
    inner = tuple(shape[1:])
    region = ((start, end), *whole(inner))
    released_shape = (end - start, *inner)
    return ReleasedPiece(name, released_shape, region, released_shape, tuple(range(len(released_shape))))


def halves_swapped(name: str, shape: Sequence[int]) -> Iterator[ReleasedPiece]:
    """A released matrix [outputs, inputs] that is ours with both halves of its inputs swapped."""
    outputs, inputs = shape
    half = inputs // 2
    for start in (0, half):
        region = ((0, outputs), (start, start + half))
        released_range = (half - start, inputs - start)
        view = (outputs, half)
        yield ReleasedPiece(name, (outputs, inputs), region, view, (0, 1), cut_dim=1, cut_range=released_range)
