"""Only the largest gradient elements of a bucket, with error feedback: the facts."""

from typing import Any

from shardwright.config.compression_facts import BucketCollective, CompressionFacts
from shardwright.config.units import FLOAT32_BYTES

_INDEX_BYTES = 4


def _summed(plan: Any, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    """An all-gather of each rank's largest elements, with their places."""
    count = -(-plan.compress_share * num_elements // 1)
    return [BucketCollective("all_gather", num_ranks * count * (_INDEX_BYTES + FLOAT32_BYTES))]


FACTS = CompressionFacts(
    name="topk",
    place=60,
    method="shardwright.parallel.compress.topk:of_plan",
    summed=_summed,
    kept_elements=lambda plan, num_elements, columns, num_ranks, shard_size: num_elements,  # the error of each element
    device_bytes=36,
    is_of_buckets=True,
    reads={"compress_share": "share"},
)
