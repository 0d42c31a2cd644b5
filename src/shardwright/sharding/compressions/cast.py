"""Uncompressed gradients, or gradients in 16 bits: the facts of three methods."""

from typing import Any

from shardwright.config.compression_facts import BucketCollective, CompressionFacts

_HALF = 2  # bytes


def _scattered(num_elements: Any, num_ranks: Any) -> list[BucketCollective]:
    """An all-to-all: each rank receives its share of the elements from all ranks."""
    return [BucketCollective("all_to_all", num_ranks * _HALF * -(-num_elements // num_ranks))]


def _summed(plan: Any, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """An all-to-all of shares, and then an all-gather of the sums of the shares."""
    (shares,) = _scattered(num_elements, num_ranks)
    return [shares, BucketCollective("all_gather", shares.num_bytes)]


FACTS = (
    CompressionFacts(name="none", place=10),
    *(
        CompressionFacts(
            name=name,
            place=place,
            method=f"shardwright.parallel.compress.cast:{name}",
            summed=_summed,
            scattered=_scattered,
            device_bytes=14,
        )
        for name, place in (("bf16", 20), ("fp16", 30))
    ),
)
