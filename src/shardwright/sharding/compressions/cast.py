"""Gradients as they are, or in 16 bits: the facts of three names."""

from typing import Any

from shardwright.config.compression_facts import BucketCollective, CompressionFacts

_HALF = 2  # bytes


def _scattered(num_elements: Any, num_ranks: Any) -> list[BucketCollective]:
    """Each rank's share of the elements comes to it from all others."""
    return [BucketCollective("all_to_all", num_ranks * _HALF * -(-num_elements // num_ranks))]


def _summed(plan: Any, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """Shares, and then each rank's sum of its share to all."""
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
