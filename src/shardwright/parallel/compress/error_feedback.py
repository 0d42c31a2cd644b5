"""Error feedback: what compression lost is added to the next gradient.

Seide et al. 2014 (Interspeech, "1-bit stochastic gradient descent"). Karimireddy et al. 2019 (arXiv 1901.09847,
algorithm 2) show that compressed SGD then converges at the rate of plain SGD. What was sent in all steps together is
the sum of the gradients but for what was lost in the last step. The errors of a run whose gradients are scaled are in
scaled units too.
"""

import torch
from torch import Tensor


class ErrorFeedback:
    """The error of one compression of one rank in the last step, float32. `lost` is None before the first step."""

    def __init__(self) -> None:
        self.lost: Tensor | None = None

    def add_to(self, gradient: Tensor) -> None:
        """Correct a gradient in place, before it is compressed. Shapes are those of every other step."""
        if self.lost is not None:
            gradient += self.lost

    def keep(self, lost: Tensor) -> None:
        """Remember what was lost; the tensor is taken over.

        Where a gradient is not finite the step is lost anyhow. The error must not carry that to the next one.
        """
        self.lost = torch.nan_to_num_(lost, nan=0.0, posinf=0.0, neginf=0.0)

    def memory(self) -> list[Tensor]:
        """The error, if there is one."""
        return [] if self.lost is None else [self.lost]

    def kept(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The error, of a gradient of this shape: zeros before the first step. What is written to it is added to the
        next gradient."""
        if self.lost is None:
            self.lost = torch.zeros(shape, dtype=torch.float32, device=device)
        assert self.lost.shape == shape, f"errors of {list(self.lost.shape)} are not those of {list(shape)}"
        return self.lost
