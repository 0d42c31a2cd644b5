"""The samples of a forward pass: its randomness may depend on them and on the place in the model, on nothing else."""

from dataclasses import dataclass


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
