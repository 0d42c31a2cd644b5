"""How many rows of a weight's gradient are computed at once where they are summed in other numbers than computed in.

On CUDA one kernel multiplies 16-bit numbers and adds the product to a float32 sum. A CPU has none: there the product is
a tensor of its own, which is added to the sum, block by block of rows, so that it is small and still in the cache.
"""

from typing import Any

from shardwright.config.array_math import most
from shardwright.config.units import MIB

_BLOCK_BYTES = 4 * MIB
_LEAST_ROWS = 64  # fewer make the product slower


def rows_at_once(num_columns: Any, element_bytes: int) -> Any:
    """Rows of a block, of a gradient with so many columns; arrays of them, of several gradients."""
    return most(_LEAST_ROWS, _BLOCK_BYTES // (element_bytes * num_columns))
