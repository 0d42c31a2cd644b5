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

_FLOAT32, _HALF, _INDEX = 4, 2, 4  # bytes
KEEPS_ERROR = ("int8", "powersgd", "topk")  # methods that keep what was lost, in float32, by element
BLOCK = 256  # elements of int8 that share a scale
SCALE_BYTES = _FLOAT32  # of a block

Shape = Sequence[int]


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
    plan: PlanSpec, shapes: Sequence[Shape], num_ranks: int, itemsize: int = 4
) -> list[BucketCollective]:
    """Collectives that leave the sum of a bucket on every rank. `itemsize` is bytes of an uncompressed element."""
    if num_ranks == 1:
        return []
    if plan.compress == "none":
        return [BucketCollective("all_reduce", itemsize * sum(map(math.prod, shapes)))]
    large, small = _split(plan, shapes)
    rows, columns = sum(math.prod(shape[:-1]) for shape in large), sum(shape[-1] for shape in large)
    num_large = sum(map(math.prod, large))
    return _as_they_are(small, itemsize) + (summed(plan, num_large, rows, columns, num_ranks) if large else [])


def scattered_bucket(
    plan: PlanSpec, shapes: Sequence[Shape], num_ranks: int, num_elements: int, itemsize: int = 4
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
        return reduced_bucket(plan, shapes, num_ranks, itemsize)
    if num_ranks == 1:
        return []
    large, small = _split(plan, shapes)
    return _as_they_are(small, itemsize) + ([_shares(plan, num_elements, num_ranks)] if large else [])


def compressed_shapes(plan: PlanSpec, shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes of the tensors of a bucket that the method compresses; all others travel as they are."""
    return [] if plan.compress == "none" else _split(plan, shapes)[0]


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


def _as_they_are(small: list[Shape], itemsize: int) -> list[BucketCollective]:
    return [BucketCollective("all_reduce", itemsize * sum(map(math.prod, small)))] if small else []


def whole_blocks(num_elements: Any) -> Any:
    """Elements of the blocks of int8 that hold so many."""
    return -(-num_elements // BLOCK) * BLOCK


def int8_bytes(num_elements: Any) -> Any:
    """Bytes of whole blocks of so many elements, each with its scale."""
    return whole_blocks(num_elements) // BLOCK * (BLOCK + SCALE_BYTES)


def _split(plan: PlanSpec, shapes: Sequence[Shape]) -> tuple[list[Shape], list[Shape]]:
    """(shapes that the method compresses, shapes that it does not)."""
    large = [shape for shape in shapes if is_compressed(plan, shape)]
    return large, [shape for shape in shapes if not is_compressed(plan, shape)]


def is_compressed(plan: PlanSpec, shape: Shape) -> bool:
    """Whether the method takes a tensor of this shape: one that is large enough; for PowerSGD a matrix, of which the
    two factors together have fewer elements."""
    if math.prod(shape) < plan.compress_least:
        return False
    if plan.compress != "powersgd":
        return True
    if len(shape) < 2:
        return False
    return plan.compress_rank * (math.prod(shape[:-1]) + shape[-1]) < math.prod(shape)
