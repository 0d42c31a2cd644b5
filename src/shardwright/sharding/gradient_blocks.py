"""Rows of a weight's gradient that are computed at once if it is summed in another dtype than it is computed in.

On CUDA one kernel multiplies 16-bit numbers and adds the product to a float32 sum. A CPU has no such kernel: the
product is a tensor of its own, which is added to the sum block by block of rows, so that it is small and still in the
cache.
"""

from typing import Any

from shardwright.config.array_math import most
from shardwright.config.units import MIB

_BLOCK_BYTES = 4 * MIB
_LEAST_ROWS = 64  # fewer make the product slower


def rows_at_once(num_columns: Any, element_bytes: int) -> Any:
    """Rows of a block of a gradient with `num_columns` columns; an array if that is one."""
    return most(_LEAST_ROWS, _BLOCK_BYTES // (element_bytes * num_columns))
