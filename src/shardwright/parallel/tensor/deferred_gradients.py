"""Weight gradients that wait: what lets a backward be cut into I (input gradient) and W (weight gradient).

The input gradient of a stage holds up the stage before it; the weight gradient holds up nobody, so a schedule may
use it to fill what would be idle time (Qi et al. 2023, arXiv 2401.10241). During an I pass every linear layer leaves
its weight-gradient product here instead of computing it; W computes what was left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], None]  # adds one weight's gradient of one microbatch


class DeferredGradients:
    """The weight gradients of one stage that are yet to be computed, by microbatch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Work]] = {}
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

    def now_or_later(self, work: Work) -> None:
        """Compute a weight's gradient, or keep the work."""
        if self._microbatch is None:
            work()
        else:
            self._kept[self._microbatch].append(work)

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        """W: compute what I left, in the order in which it was left."""
        for work in self._kept.pop(microbatch):
            work()

    def num_kept(self) -> int:
        """Microbatches whose W is outstanding."""
        return len(self._kept)
