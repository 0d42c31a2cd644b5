"""How a tensor of a released checkpoint lies in one of ours.

The same description is read both ways: to load, and to export.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.sharding.parameter_shard import Box


@dataclass(frozen=True)
class ReleasedPiece:
    """A tensor of theirs, `name` of `shape`, which fills the `region` of one of ours.

    Theirs seen as `view`, its dims in the `order` given, is the region, dim by dim. `interleaved` counts elements at
    the beginning of dim `pairs_dim` of the region that are pairs (2i, 2i + 1) with them and (i, i + D/2) with us.
    `plus` is added to theirs: norms of Gemma are 1 + weight. Where theirs holds several of our regions, `cut` is the
    range of its dim `cut_dim` that is this one; the view is of that part. Of a table that
    `may_be_longer` the first rows are taken.
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
    cut: tuple[int, int] | None = None
    may_be_longer: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor of theirs has the shape: a table of learned positions may have more of them."""
        return shape == self.shape or (
            self.may_be_longer and shape[1:] == self.shape[1:] and len(shape) > 0 and shape[0] > self.shape[0]
        )

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part of theirs that is ours."""
        if self.cut is None:
            return self.shape
        return tuple(self.cut[1] - self.cut[0] if d == self.cut_dim else size for d, size in enumerate(self.shape))

    def __post_init__(self) -> None:
        assert math.prod(self.part_shape) == math.prod(self.view), (
            f"{self.name}: {self.shape} is not seen as {self.view}"
        )
        seen = tuple(self.view[dim] for dim in self.order)
        sizes = tuple(stop - start for start, stop in self.region)
        assert seen == sizes, f"{self.name}: {seen} does not fill {sizes}"


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def plain(name: str, shape: Sequence[int], plus: float = 0.0) -> ReleasedPiece:
    """A tensor that is ours as it is."""
    return seen_as(name, shape, shape, plus=plus)


def seen_as(name: str, released_shape: Sequence[int], model_shape: Sequence[int], plus: float = 0.0) -> ReleasedPiece:
    """A tensor that is ours with its dims split or joined."""
    shape = tuple(model_shape)
    return ReleasedPiece(name, tuple(released_shape), whole(shape), shape, tuple(range(len(shape))), plus=plus)


def transposed(name: str, shape: Sequence[int]) -> ReleasedPiece:
    """A matrix [outputs, inputs] of ours, that theirs is the transpose of."""
    outputs, inputs = shape
    return ReleasedPiece(name, (inputs, outputs), whole(shape), (inputs, outputs), (1, 0))


def rows(name: str, shape: Sequence[int], first: int, end: int) -> ReleasedPiece:
    """A tensor that is the rows [first, end) of ours, of a full shape."""
    rest = tuple(shape[1:])
    region = ((first, end), *whole(rest))
    released_shape = (end - first, *rest)
    return ReleasedPiece(name, released_shape, region, released_shape, tuple(range(len(released_shape))))
