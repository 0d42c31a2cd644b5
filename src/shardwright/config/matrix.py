"""The weight matrices of a layer: their shapes, and what tensor-parallel ranks and experts share of them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with, of full shape [*outputs, inner].

    `cut` is the dim that tensor-parallel ranks share, None where each has all of it. `experts` matrices of this shape
    lie one behind the other, [experts, *outputs, inner], where each expert has its own; 0 is one for all tokens.

    It may be several linear maps, that lie along dim `side_by_side` of the outputs, so wide as `widths` says; where
    that is empty it is one.
    """

    name: str
    outputs: tuple[int, ...]
    inner: int
    cut: int | None = None
    experts: int = 0
    side_by_side: int = 0
    widths: tuple[int, ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        return (*((self.experts,) if self.experts else ()), *self.outputs, self.inner)

    @property
    def num_elements(self) -> int:
        """Elements of all experts' together."""
        return math.prod(self.full_shape)

    @cached_property
    def columns(self) -> int:
        """Width of what a product with it gives."""
        return math.prod(self.outputs)

    @cached_property
    def is_row_parallel(self) -> bool:
        """True if ranks share its inputs, so that they sum what it gives, and not its outputs."""
        return self.cut == len(self.outputs)

    def columns_on(self, tp: Any) -> Any:
        """Width of what a product gives on each of `tp` ranks, a number or an array of them."""
        if self.cut is None or self.is_row_parallel:
            return self.columns
        side_by_side = self.outputs[0] if self.cut else 1  # gate and up, of which each is cut
        return side_by_side * (self.columns // side_by_side // tp)

    def inner_on(self, tp: Any) -> Any:
        """Width of what a product takes on each of `tp` ranks, a number or an array of them."""
        return self.inner // tp if self.is_row_parallel else self.inner
