"""The parameters of each flat buffer and their order: the layout that the runtime has and the account predicts.

The functions take anything that has a place. So the runtime groups its tensors, and a prediction groups places alone,
by the same lines.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from shardwright.config.units import MIB
from shardwright.sharding.flat_buffer import FlatLayout, flat_layout, rows_of
from shardwright.sharding.parameter_shard import ParameterShard

T = TypeVar("T", bound=Hashable)


def bucket_elements(bucket_mib: float, element_bytes: int) -> int:
    """Elements at which a bucket of plan.bucket_mib is full, in the number type of the computation."""
    return int(bucket_mib * MIB / element_bytes)


def unit_groups(
    regions: Mapping[str, Sequence[T]],
    late: Collection[T],
    is_gathered: Callable[[ParameterShard], bool],
    most_elements: int,
    place_of: Callable[[T], ParameterShard],
    is_by_matrix: Callable[[ParameterShard], bool] = lambda place: False,
) -> list[list[T]]:
    """The parameters of each unit of a stage, first to last.

    Experts' parameters have units of their own, because their replicas are other ranks. So have parameters that are
    updated by whole matrices, because their optimizer state differs and the ranks work on them together; parameters
    that are computed with in float32, whatever the dtype of the others; frozen ones, which have values alone; and of
    these the matrices in NF4. A unit is one region if values are gathered layer by layer (ZeRO-3). Else neighbours are
    together until there are `most_elements`. `late` parameters, whose gradients are complete last, have a unit each.
    """
    late_groups = [[p] for p in late if not (is_gathered(place_of(p)) or place_of(p).is_frozen)]
    late_parameters = {p for group in late_groups for p in group}

    def kind_of(parameter: T) -> tuple[bool, bool, bool, bool, str]:
        place = place_of(parameter)
        return place.is_expert, is_by_matrix(place), place.is_exact, place.is_frozen, place.row_format

    kinds = {p: kind_of(p) for parameters in regions.values() for p in parameters if p not in late_parameters}
    groups: list[list[T]] = []
    for kind in sorted(set(kinds.values())):
        kind_regions = [[p for p in parameters if kinds.get(p) == kind] for parameters in regions.values()]
        kind_parameters = [p for region in kind_regions for p in region]
        if kind_parameters and is_gathered(place_of(kind_parameters[0])):
            groups += [region for region in kind_regions if region]
        else:
            groups += _filled(kind_parameters, most_elements, place_of)
    # In the order of the layers: a unit is complete when the gradient of its first parameter is.
    order = {p: i for i, p in enumerate(p for parameters in regions.values() for p in parameters)}
    return late_groups + sorted(groups, key=lambda group: min(order[p] for p in group))


def _filled(parameters: Sequence[T], most_elements: int, place_of: Callable[[T], ParameterShard]) -> list[list[T]]:
    """Groups of neighbours, each filled until it has `most_elements`, counted in parts of mean size.

    So ranks of tp, whose parts may be of unequal sizes, group alike: they sum a unit over tp together.
    """
    groups: list[list[T]] = []
    filling: list[T] = []
    num_elements = 0.0
    # From the end, because that is about the order in which gradients become complete.
    for parameter in reversed(parameters):
        filling.append(parameter)
        num_elements += place_of(parameter).mean_elements
        if num_elements >= most_elements:
            groups.append(filling)
            filling, num_elements = [], 0.0
    return groups + ([filling] if filling else [])


def in_unit_order(parameters: Iterable[T], place_of: Callable[[T], ParameterShard]) -> list[T]:
    """The parameters of one unit in the order of its buffer."""

    def order(parameter: T) -> tuple[bool, bool, int]:
        # Decayed weights first, so that the optimizer sees two flat tensors. Long rows first, for less padding.
        place = place_of(parameter)
        return place.init != "normal", bool(place.summed_over), -rows_of(place.shape)[1]

    return sorted(parameters, key=order)


def num_hosted(host_share: float, shard_size: int) -> int:
    """Elements of a shard, the first ones, whose optimizer state is in host memory."""
    # A multiple of the CPU's vector size: its update rounds the last few elements of a tensor differently.
    return shard_size if host_share == 1 else int(host_share * shard_size) // 64 * 64


def unit_layout(places: Sequence[ParameterShard], num_shards: int) -> FlatLayout:
    """The places of a unit's parameters, in its order, in a buffer that is cut into shards: between rows, or in NF4
    between any words."""
    rows = [(place.num_words, 1) if place.row_format else rows_of(place.shape) for place in places]
    return flat_layout(rows, num_shards)
