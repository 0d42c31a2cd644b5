"""Gradient matrices as two factors of low rank, with error feedback and a warm start (Vogels et al. 2019, arXiv
1905.13727): the facts."""

from typing import Any

from shardwright.config.compression_facts import BucketCollective, CompressionFacts
from shardwright.config.units import FLOAT32_BYTES


def _summed(plan: Any, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """An all-reduce for each of the two factors, of all matrices."""
    return [BucketCollective("all_reduce", FLOAT32_BYTES * plan.compress_rank * length) for length in (rows, columns)]


def _kept_elements(plan: Any, num_elements: int, columns: int, num_ranks: int, shard_size: int) -> int:
    """The error of each element, and the second factors, which the next step starts from."""
    return num_elements + int(plan.compress_rank) * columns


FACTS = CompressionFacts(
    name="powersgd",
    place=50,
    method="shardwright.parallel.compress.powersgd:of_plan",
    summed=_summed,
    kept_elements=_kept_elements,
    device_bytes=36,
    # Both factors together must have fewer elements than the matrix.
    takes=lambda plan, num_elements, columns: plan.compress_rank * (num_elements / columns + columns) < num_elements,
    reads={"compress_rank": "rank"},
)
