"""The interface between the pipeline executor and the stages of a model, and the samples of a forward pass: its
randomness may depend on them and on the place in the model, on nothing else."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shardwright.parallel.tensor.deferred_gradients import DeferredGradients


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of training: the run's seed, the optimizer step (from 0), and the index of its first sample in the
    global batch of that step. It is the same on every rank and in every plan with the same microbatches.

    `loss_factor` multiplies the gradients of losses within the model, which no stage passes on, as the executor
    multiplies the gradient of the main loss. It accounts for the share of the batch's positions that are no padding.
    """

    seed: int
    step: int
    first_sample: int
    loss_factor: float = 1.0


class MicrobatchTokens(Protocol):
    """Token ids of microbatches by number, each [B, S + 1], such as a list."""

    def __getitem__(self, index: int, /) -> Tensor: ...


class Stage(Protocol):
    """The interface of a stage of the model that the executor needs."""

    @property
    def deferred(self) -> DeferredGradients:
        """The weight gradients that an I (input gradient) action leaves for its W (weight gradient) action."""

    def __call__(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        microbatch: Microbatch | None = None,
        marked_BT: Tensor | None = None,
    ) -> Tensor:
        """The hidden states, or the mean loss if there are targets."""

    def empty_hidden(self, batch: int) -> Tensor:
        """Memory for the hidden states that pass between stages."""
