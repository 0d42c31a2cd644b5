"""Which parameters lie in one flat buffer, and in which order: the layout that the runtime has and that is predicted.

The functions take anything that has a place, so that the runtime groups its tensors and a prediction groups places
alone by the same lines.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from shardwright.spec.flat import FlatLayout, flat_layout, rows_of
from shardwright.spec.place import Place

# Reductions under way at once. Each holds a buffer, and in stages 2 and 3 that memory is what is being saved.
MOST_REDUCING = 2

T = TypeVar("T", bound=Hashable)


def bucket_elements(bucket_mib: float, element_bytes: int) -> int:
    """Elements at which a bucket of plan.bucket_mib is full, in the number type of the computation."""
    return int(bucket_mib * 2**20 / element_bytes)


def unit_groups(
    regions: Mapping[str, Sequence[T]],
    late: Collection[T],
    by_region: bool,
    most_elements: int,
    place_of: Callable[[T], Place],
) -> list[list[T]]:
    """The parameters of each unit of a stage, first to last.

    By region where values are gathered layer by layer (ZeRO-3). Else neighbours together until there are
    `most_elements`; `late` ones, whose gradients are complete last, by themselves.
    """
    if by_region:
        return [list(held) for held in regions.values() if held]
    complete_last = set(late)
    groups: list[list[T]] = []
    filling: list[T] = []
    num_elements = 0
    # From the end, for that is about the order in which gradients become complete.
    for parameter in reversed([p for held in regions.values() for p in held if p not in complete_last]):
        filling.append(parameter)
        num_elements += place_of(parameter).num_elements
        if num_elements >= most_elements:
            groups.append(filling)
            filling, num_elements = [], 0
    groups += [filling] if filling else []
    return [*([p] for p in late), *reversed(groups)]


def in_unit_order(parameters: Iterable[T], place_of: Callable[[T], Place]) -> list[T]:
    """The parameters of one unit as they lie in its buffer."""

    def order(parameter: T) -> tuple[bool, bool, int]:
        # Decayed weights first: the optimizer sees two flat tensors. Long rows first: less padding.
        place = place_of(parameter)
        return place.init != "normal", bool(place.summed_over), -rows_of(place.shape)[1]

    return sorted(parameters, key=order)


def unit_layout(places: Sequence[Place], num_shards: int) -> FlatLayout:
    """Where the parameters of a unit, in its order, lie in a buffer that is cut into shards."""
    return flat_layout([rows_of(place.shape) for place in places], num_shards)
