"""Gradients in 8 bits and a scale for each block, with error feedback: the facts."""

from typing import Any

from shardwright.config.compression_facts import BucketCollective, CompressionFacts

BLOCK = 256  # elements that share a scale
SCALE_BYTES = 4  # of a block, float32


def whole_blocks(num_elements: Any) -> Any:
    """Elements of the whole blocks that hold `num_elements` elements."""
    return -(-num_elements // BLOCK) * BLOCK


def int8_bytes(num_elements: Any) -> Any:
    """Bytes of the whole blocks that hold `num_elements` elements, each with its scale."""
    return whole_blocks(num_elements) // BLOCK * (BLOCK + SCALE_BYTES)


def _scattered(num_elements: Any, num_ranks: Any) -> list[BucketCollective]:
    """An all-to-all: each rank receives its share of the elements from all ranks."""
    return [BucketCollective("all_to_all", num_ranks * int8_bytes(-(-num_elements // num_ranks)))]


def _summed(plan: Any, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """An all-to-all of shares, and then an all-gather of the quantised sums of the shares."""
    (shares,) = _scattered(num_elements, num_ranks)
    return [shares, BucketCollective("all_gather", shares.num_bytes)]


def _kept_elements(plan: Any, num_elements: int, columns: int, num_ranks: int, shard_size: int) -> int:
    """Errors of the part for each rank; and of the sum, if that is quantised for all ranks."""
    if shard_size:
        return num_ranks * int(whole_blocks(shard_size))
    return (num_ranks + 1) * int(whole_blocks(-(-num_elements // num_ranks)))


FACTS = CompressionFacts(
    name="int8",
    place=40,
    method="shardwright.parallel.compress.int8:of_plan",
    summed=_summed,
    scattered=_scattered,
    kept_elements=_kept_elements,
    device_bytes=36,
    is_of_buckets=True,
)
