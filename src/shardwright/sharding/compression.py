"""Which gradients a method of compression takes, and what one bucket of them communicates; parallel/compress is what
runs.

Bytes of a collective are counted as in the ledger of a run: the operand of an all-reduce or all-to-all, the result of
an all-gather. Bytes on the wire are those that all d ranks of the axis send together (`wire_bytes`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardwright.config.plan import PlanSpec
from shardwright.sharding.groups import zero_stage
from shardwright.sharding.mesh import expert_axis_sizes
from shardwright.sharding.parameter_shard import ParameterShard

_FLOAT32, _HALF, _INDEX = 4, 2, 4  # bytes
KEEPS_ERROR = ("int8", "powersgd", "topk")  # methods that keep what was lost, in float32, by element
BLOCK = 256  # elements of int8 that share a scale
SCALE_BYTES = _FLOAT32  # of a block

# Methods that look at all tensors of a bucket at once: what is made of one depends on its neighbours.
_OF_WHOLE_BUCKETS = ("int8", "topk")


@dataclass(frozen=True)
class BucketCollective:
    """One collective over the replicas, by its name in the ledger. Bytes may be an array with one entry a plan."""

    kind: str
    num_bytes: Any


class Compression(Protocol):
    """The fields of a plan that say how gradients are summed in fewer bytes."""

    @property
    def compress(self) -> str: ...
    @property
    def compress_rank(self) -> int: ...
    @property
    def compress_share(self) -> float: ...


def reduced_bucket(
    plan: PlanSpec, places: Sequence[ParameterShard], num_ranks: int, itemsize: int = 4
) -> list[BucketCollective]:
    """Collectives that leave the sum of a bucket on every rank. `itemsize` is bytes of an uncompressed element."""
    if num_ranks == 1:
        return []
    if plan.compress == "none":
        return _as_they_are(places, itemsize)
    large, small = _split(plan, places)
    rows, columns = (sum(of) for of in zip(*map(_sides, large), strict=True)) if large else (0, 0)
    num_large = sum(place.num_elements for place in large)
    return _as_they_are(small, itemsize) + (summed(plan, num_large, rows, columns, num_ranks) if large else [])


def scattered_bucket(
    plan: PlanSpec, places: Sequence[ParameterShard], num_ranks: int, num_elements: int, itemsize: int = 4
) -> list[BucketCollective]:
    """Collectives that leave a share of the sum on each rank. `num_elements` is the bucket's with its padding.
    ValueError if the bucket does not split into equal shares."""
    if num_elements % num_ranks:
        raise ValueError(
            f"a bucket of {num_elements} elements has no equal shares for {num_ranks} ranks "
            f"({num_elements} / {num_ranks} = {num_elements / num_ranks:.2f}); pad it to a multiple of {num_ranks}"
        )
    if plan.compress == "none" and num_ranks > 1:
        return [BucketCollective("reduce_scatter", itemsize * num_elements)]
    if plan.compress in ("none", "powersgd", "topk"):
        return reduced_bucket(plan, places, num_ranks, itemsize)
    if num_ranks == 1:
        return []
    large, small = _split(plan, places)
    return _as_they_are(small, itemsize) + ([_shares(plan, num_elements, num_ranks)] if large else [])


def compressed(plan: PlanSpec, places: Sequence[ParameterShard]) -> list[ParameterShard]:
    """The tensors of a bucket that the method compresses; all others travel as they are."""
    return [] if plan.compress == "none" else _split(plan, places)[0]


def wire_bytes(collectives: Sequence[BucketCollective], num_ranks: Any) -> Any:
    """Bytes that all ranks send together, by algorithms that waste nothing (a ring, say).

    Each of the d ranks sends (d - 1) / d of the bytes of a gathered or exchanged tensor, and of a reduced one twice
    that (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). The sum is a whole number.
    """
    times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    return (num_ranks - 1) * sum(times[collective.kind] * collective.num_bytes for collective in collectives)


def summed(plan: Compression, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """What sums `num_elements` in matrices of so many rows and columns in all, on every rank, by a method. Elementwise:
    numbers may be arrays."""
    if plan.compress == "powersgd":
        return [BucketCollective("all_reduce", _FLOAT32 * plan.compress_rank * length) for length in (rows, columns)]
    if plan.compress == "topk":
        count = -(-plan.compress_share * num_elements // 1)
        return [BucketCollective("all_gather", num_ranks * count * (_INDEX + _FLOAT32))]
    shares = _shares(plan, num_elements, num_ranks)
    return [shares, BucketCollective("all_gather", shares.num_bytes)]


def _shares(plan: Compression, num_elements: Any, num_ranks: Any) -> BucketCollective:
    """Each rank's share of the elements comes to it from all others, in 8 or 16 bits."""
    share = -(-num_elements // num_ranks)
    return BucketCollective("all_to_all", num_ranks * (int8_bytes(share) if plan.compress == "int8" else _HALF * share))


def scattered(plan: Compression, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """Collectives that leave each rank its share of the sum of a bucket. Methods of whole tensors sum them on every
    rank."""
    if plan.compress in ("powersgd", "topk"):
        return summed(plan, num_elements, rows, columns, num_ranks)
    return [_shares(plan, num_elements, num_ranks)]


def _as_they_are(small: Sequence[ParameterShard], itemsize: int) -> list[BucketCollective]:
    return [BucketCollective("all_reduce", itemsize * sum(place.num_elements for place in small))] if small else []


def whole_blocks(num_elements: Any) -> Any:
    """Elements of the blocks of int8 that hold so many."""
    return -(-num_elements // BLOCK) * BLOCK


def int8_bytes(num_elements: Any) -> Any:
    """Bytes of whole blocks of so many elements, each with its scale."""
    return whole_blocks(num_elements) // BLOCK * (BLOCK + SCALE_BYTES)


def _split(plan: PlanSpec, places: Sequence[ParameterShard]) -> tuple[list[ParameterShard], list[ParameterShard]]:
    """(tensors that the method compresses, tensors that it does not)."""
    large = [place for place in places if is_compressed(plan, place)]
    return large, [place for place in places if not is_compressed(plan, place)]


def is_compressed(plan: PlanSpec, place: ParameterShard) -> bool:
    """Whether the method takes a tensor: one that is large enough; for PowerSGD a matrix, of which the two factors
    together have fewer elements. Where the method looks at whole buckets, none that ranks with other buckets hold too:
    they must stay alike."""
    num_elements = place.mean_elements  # so that all parts of a tensor are compressed, or none is
    if num_elements < plan.compress_least:
        return False
    if plan.compress in _OF_WHOLE_BUCKETS and _is_among_others_elsewhere(plan, place):
        return False
    columns = place.shape[-1]
    return plan.compress != "powersgd" or (
        len(place.shape) > 1 and plan.compress_rank * (num_elements / columns + columns) < num_elements
    )


def _is_among_others_elsewhere(plan: PlanSpec, place: ParameterShard) -> bool:
    """Whether ranks that do not sum its gradients with this one hold the tensor too, beside other tensors: those of tp,
    which each have other parts of the matrices around it; and those with the other end of a tied table, where it is
    gathered with its neighbours."""
    tp = expert_axis_sizes(plan)["etp"] if place.is_expert else plan.tp
    is_whole = tp > 1 and not {"tp", "etp"} & set(place.sharded_over)
    return is_whole or (place.is_tied and plan.pp > 1 and zero_stage(plan) == 3)


def _sides(place: ParameterShard) -> tuple[int, int]:
    """Rows and columns of a matrix, leading dims being rows."""
    return math.prod(place.shape[:-1]), place.shape[-1]
