"""The weight matrices of a layer: their shapes, and how tensor-parallel ranks and experts divide them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Matrix:
    """A weight with which tokens are multiplied, of full shape [*outputs, inner].

    `sharded_dim` is the dim that tensor-parallel ranks shard; None if each has the full matrix. If each expert has its
    own matrix, `experts` of them are stacked, [experts, *outputs, inner]; 0 means one matrix for all tokens.

    It may be several linear maps, concatenated along dim `side_by_side` of the outputs, with sizes `widths`; it is a
    single map if `widths` is empty.
    """

    name: str
    outputs: tuple[int, ...]
    inner: int
    sharded_dim: int | None = None
    experts: int = 0
    side_by_side: int = 0
    widths: tuple[int, ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the unsharded weight."""
        return (*((self.experts,) if self.experts else ()), *self.outputs, self.inner)

    @property
    def num_elements(self) -> int:
        """Number of elements, over all experts."""
        return math.prod(self.full_shape)

    @cached_property
    def columns(self) -> int:
        """Width of the output of a product with it."""
        return math.prod(self.outputs)

    @cached_property
    def is_row_parallel(self) -> bool:
        """True if ranks shard its input dim, so that they sum their outputs; False if they shard its output dims."""
        return self.sharded_dim == len(self.outputs)

    def columns_on(self, tp: Any) -> Any:
        """Width of the output of a product on each of `tp` ranks; `tp` is a number or an array."""
        if self.sharded_dim is None or self.is_row_parallel:
            return self.columns
        side_by_side = self.outputs[0] if self.sharded_dim else 1  # gate and up, each sharded
        return side_by_side * (self.columns // side_by_side // tp)

    def inner_on(self, tp: Any) -> Any:
        """Width of the input of a product on each of `tp` ranks; `tp` is a number or an array."""
        return self.inner // tp if self.is_row_parallel else self.inner
