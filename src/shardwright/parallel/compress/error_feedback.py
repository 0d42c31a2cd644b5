"""Error feedback: what compression lost is added to the next gradient.

Seide et al. 2014 (Interspeech, "1-bit stochastic gradient descent"). Karimireddy et al. 2019 (arXiv 1901.09847,
algorithm 2) show that compressed SGD then converges at the rate of plain SGD. What was sent in all steps together is
the sum of the gradients but for what was lost in the last step. The errors of a run whose gradients are scaled are in
scaled units too.
"""

import torch
from torch import Tensor


class ErrorFeedback:
    """What one compression of one rank lost in the last step, float32. `lost` is None before the first step."""

    def __init__(self) -> None:
        self.lost: Tensor | None = None

    def add_to(self, gradient: Tensor) -> None:
        """Correct a gradient in place, before it is compressed.

        ValueError if a state was loaded that belongs to a bucket of another size or to another number of replicas.
        """
        if self.lost is None:
            return
        if self.lost.shape != gradient.shape:
            raise ValueError(
                f"the error that compression kept has shape {list(self.lost.shape)}, and the gradients "
                f"{list(gradient.shape)}: it was saved with other buckets or other replicas; begin without it"
            )
        gradient += self.lost.to(gradient.device)

    def keep(self, lost: Tensor) -> None:
        """Remember what was lost; the tensor is taken over.

        Where a gradient is not finite the step is lost anyhow. The error must not carry that to the next one.
        """
        self.lost = torch.nan_to_num_(lost, nan=0.0, posinf=0.0, neginf=0.0)

    def memory(self) -> list[Tensor]:
        """The error, if there is one."""
        return [] if self.lost is None else [self.lost]

    def load(self, lost: Tensor | None) -> None:
        """Go on from a saved error."""
        self.lost = None if lost is None else lost.detach().clone()
