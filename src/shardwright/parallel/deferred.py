"""Weight gradients that wait: what lets a backward be cut into I (input gradient) and W (weight gradient).

The input gradient of a stage holds up the stage before it; the weight gradient holds up nobody, so a schedule may
use it to fill what would be idle time (Qi et al. 2023, arXiv 2401.10241). During an I pass every linear layer leaves
its weight-gradient product here instead of computing it; W computes what was left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.parallel.parameter import PlacedParameter

Product = Callable[[], Tensor]  # computes the gradient of one weight


class DeferredGradients:
    """The weight gradients of one stage that are yet to be computed, by microbatch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[PlacedParameter, Product]]] = {}
        self._microbatch: int | None = None

    @contextmanager
    def keeping(self, microbatch: int) -> Iterator[None]:
        """While this lasts, weight gradients are kept for `compute(microbatch)`."""
        self._microbatch = microbatch
        self._kept[microbatch] = []
        try:
            yield
        finally:
            self._microbatch = None

    def now_or_later(self, weight: PlacedParameter, product: Product) -> Tensor | None:
        """The gradient for autograd to accumulate; or None, if it was put off."""
        if self._microbatch is None:
            return product()
        self._kept[self._microbatch].append((weight, product))
        return None

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        """W: compute what I left, in the order in which it was left, and add it to the gradients."""
        for weight, product in self._kept.pop(microbatch):
            weight.accumulate(product())

    def num_kept(self) -> int:
        """Microbatches whose W is outstanding."""
        return len(self._kept)
