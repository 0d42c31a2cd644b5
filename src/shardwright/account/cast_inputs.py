"""Inputs of products that are kept in fp8, in place of 16 bits: where weight gradients are in fp8 and nobody else keeps
them (parallel/tensor/cast_input.py).

Sizes are bytes on one rank.
"""

from collections.abc import Mapping

from shardwright.account.kept_tensors import FLOAT32, Bytes, Share
from shardwright.config.job import JobSpec
from shardwright.config.precision import FLOAT8_TILE

IN_FLOAT8 = "{} in fp8"


def cast_inputs(
    job: JobSpec, share: Share, widths: Mapping[str, tuple[str, int]], num_groups: int = 1
) -> tuple[dict[str, Bytes], dict[str, tuple[str, ...]]]:
    """(sizes of the cast tensors, what parts keep in place of what they take). `widths` have by part the tensor that
    its product takes, and how wide that is on a rank. Of `num_groups` of rows each has a tensor's scale."""
    if not job.precision.float8_weight_gradients:
        return {}, {}
    sizes = {
        IN_FLOAT8.format(tensor): _cast_bytes(job.precision.float8, share.tensors[tensor], width, num_groups)
        for tensor, width in widths.values()
    }
    return sizes, {part: (IN_FLOAT8.format(tensor),) for part, (tensor, _) in widths.items()}


def _cast_bytes(recipe: str, elements: Bytes, width: int, num_groups: int) -> Bytes:
    rows = elements // width
    scales = {"rowwise": rows, "blockwise": rows * -(-width // FLOAT8_TILE)}
    return elements + FLOAT32 * scales.get(recipe, num_groups)
