"""Deferred weight gradients, which split a backward into I (input gradient) and W (weight gradient).

The stage before needs a stage's input gradient; nothing waits for its weight gradients, so a schedule may use them to
fill idle time (Qi et al. 2023, arXiv 2401.10241). During an I pass every linear layer leaves its weight-gradient
product here instead of computing it; the W pass computes these products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], None]  # adds one weight's gradient of one microbatch


class DeferredGradients:
    """The weight gradients of one stage that are yet to be computed, by microbatch."""

    def __init__(self) -> None:
        self._deferred_work: dict[int, list[Work]] = {}
        self._microbatch: int | None = None

    @contextmanager
    def keeping(self, microbatch: int) -> Iterator[None]:
        """A block in which weight gradients are kept for `compute(microbatch)`."""
        self._microbatch = microbatch
        self._deferred_work[microbatch] = []
        try:
            yield
        finally:
            self._microbatch = None

    def now_or_later(self, work: Work) -> None:
        """Compute a weight's gradient, or keep the work within a `keeping` block."""
        if self._microbatch is None:
            work()
        else:
            self._deferred_work[self._microbatch].append(work)

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        """The W pass of a microbatch: compute the weight gradients that its I pass kept, in the same order."""
        for work in self._deferred_work.pop(microbatch):
            work()

    def num_kept(self) -> int:
        """The number of microbatches whose W pass is still to come."""
        return len(self._deferred_work)
