"""A compression that is described and computed in this file alone, as one that somebody adds: float64.

Gradients travel in 64 bits, so nothing is lost, and four bytes more than without it are sent for each element.
"""

from typing import Any

import torch

from shardwright.config.compression_facts import COMPRESSIONS, BucketCollective, CompressionFacts
from shardwright.config.plan import PlanSpec
from shardwright.parallel.compress.cast import Cast
from support.ranks import _on_mesh

NAME = "float64"


def of_plan(plan: PlanSpec) -> Cast:
    return Cast(torch.float64)


def scattered(num_elements: Any, num_ranks: Any) -> list[BucketCollective]:
    return [BucketCollective("all_to_all", num_ranks * 8 * -(-num_elements // num_ranks))]


def summed(plan: Any, num_elements: Any, rows: Any, columns: Any, num_ranks: Any) -> list[BucketCollective]:
    (shares,) = scattered(num_elements, num_ranks)
    return [shares, BucketCollective("all_gather", shares.num_bytes)]


FACTS = CompressionFacts(
    name=NAME, place=35, method="support.added_compression:of_plan", summed=summed, scattered=scattered, device_bytes=32
)


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such a compression."""
    with COMPRESSIONS.also(FACTS):
        return _on_mesh(rank, store, *args)
