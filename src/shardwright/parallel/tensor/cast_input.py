"""A product's input in fp8, kept in place of 16 bits where the weight's gradient is computed from fp8 as well.

What is kept is what the forward multiplied with. In the backward it is widened, which rounds nothing, and then treated
as any input: gathered over tp where the sequence is sharded, put off with the weight's gradient, cast along tokens.
"""

import torch
from torch import Tensor

from shardwright.precision.float8 import Quantised, Ranges
from shardwright.precision.float8_experts import CastRows
from shardwright.precision.float8_product import dequantise


class CastMatrix:
    """An input [S, B, H], or this rank's part of it, as the matrix [S x B, H]."""

    def __init__(self, cast: Quantised, like: Tensor) -> None:
        self._cast: Quantised | None = cast
        self._granularity, self._shape, self._dtype = cast.granularity, like.shape, like.dtype

    def kept(self) -> tuple[Tensor, ...]:
        """Values and scales. Called once."""
        cast, self._cast = self._cast, None
        assert cast is not None, "an input is kept once"
        return cast.values, cast.scales

    def widen(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The input in its shape and dtype."""
        values, scales = kept
        return dequantise(Quantised(values, scales, self._granularity), self._dtype).view(self._shape)


class CastExpertRows:
    """Rows of experts [N, H]."""

    def __init__(self, cast: CastRows, ranges: Ranges, dtype: torch.dtype) -> None:
        self._cast: CastRows | None = cast
        self._granularity, self._ranges, self._dtype = cast.of.granularity, ranges, dtype

    def kept(self) -> tuple[Tensor, ...]:
        """Values and scales. Called once."""
        cast, self._cast = self._cast, None
        assert cast is not None, "an input is kept once"
        return cast.of.values, cast.of.scales

    def widen(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The rows in their dtype."""
        values, scales = kept
        return CastRows(Quantised(values, scales, self._granularity)).widened(self._ranges, self._dtype)


def own_part(whole: Quantised, size: int, index: int) -> Quantised:
    """The rows of one of `size` ranks, in memory of their own."""
    if size == 1:
        return whole
    num_rows = whole.values.shape[0] // size
    rows = slice(index * num_rows, (index + 1) * num_rows)
    scales = whole.scales if whole.granularity == "tensor" else whole.scales[rows].clone()
    return Quantised(whole.values[rows].clone(), scales, whole.granularity)
