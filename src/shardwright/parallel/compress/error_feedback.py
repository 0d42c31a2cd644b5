"""Error feedback: the error of a compression is added to the next gradient.

Seide et al. 2014 (Interspeech, "1-bit stochastic gradient descent"). Karimireddy et al. 2019 (arXiv 1901.09847,
algorithm 2) show that compressed SGD then converges at the rate of plain SGD. The sum of all sent gradients differs
from the sum of all gradients only by the error of the last step. If a run scales its gradients, its errors are scaled
too.
"""

import torch
from torch import Tensor


class ErrorFeedback:
    """The error of one compression of one rank in the last step, float32. `lost` is None before the first step."""

    def __init__(self) -> None:
        self.lost: Tensor | None = None

    def add_to(self, gradient: Tensor) -> None:
        """Add the error to a gradient in place, before it is compressed. Every step must have the same shape."""
        if self.lost is not None:
            gradient += self.lost

    def keep(self, lost: Tensor) -> None:
        """Keep the error of this step. The tensor is overwritten, and belongs to this object.

        If a gradient is not finite its step is skipped anyway. The error must not carry that to the next step.
        """
        self.lost = torch.nan_to_num_(lost, nan=0.0, posinf=0.0, neginf=0.0)

    def state_tensors(self) -> list[Tensor]:
        """The error, if there is one."""
        return [] if self.lost is None else [self.lost]

    def lost_or_zeros(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The error of a gradient of this shape, which is set to zeros before the first step. Values written to it are
        added to the next gradient."""
        if self.lost is None:
            self.lost = torch.zeros(shape, dtype=torch.float32, device=device)
        assert self.lost.shape == shape, f"errors of {list(self.lost.shape)} are not those of {list(shape)}"
        return self.lost
