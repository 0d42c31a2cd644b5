"""The samples of a forward pass: all on which its randomness may depend, besides the place in the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of training: the run's seed, the optimizer step (from 0), and the index of its first sample in the
    global batch of that step. The same on every rank and in every plan that cuts microbatches alike.

    `loss_factor` is what losses within the model, which no stage passes on, multiply their gradient with: as the
    executor does with that of the loss, over the share of the batch's positions that are no filling.
    """

    seed: int
    step: int
    first_sample: int
    loss_factor: float = 1.0
