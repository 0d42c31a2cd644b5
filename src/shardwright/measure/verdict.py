"""The difference of a plan from one rank: the results of each rank, and the largest differences between them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.train_step import StepResult


@dataclass(frozen=True)
class Record:
    """The result of one rank: its steps, its boxes of the parameters after them, and the loss of a final evaluation."""

    steps: list[StepResult]
    boxes: list[tuple[ParameterShard, Tensor]]
    evaluated: float | None


@dataclass(frozen=True)
class Verdict:
    """The largest differences between a plan and one rank.

    Losses of steps, and of an evaluation after them, differ in nats per token. A gradient norm differs relative to the
    one rank's; a parameter by the norm of the difference over the norm of the whole tensor. A difference is infinite if
    a side is not a finite number, or only one of them skipped a step. `bitwise` is True if nothing differs at all, and
    everything is a finite number.
    """

    steps: int
    world: int
    max_loss_difference: float
    max_grad_norm_relative_difference: float
    max_parameter_relative_difference: float
    bitwise: bool

    def within(self, tolerance: float) -> bool:
        """True if no difference is larger than `tolerance`."""
        return all(difference <= tolerance for difference in self.differences)

    @property
    def differences(self) -> tuple[float, float, float]:
        """The largest difference of losses, of gradient norms and of parameters."""
        norm, parameter = self.max_grad_norm_relative_difference, self.max_parameter_relative_difference
        return self.max_loss_difference, norm, parameter


def compare(ranks: list[Record], reference: Record) -> Verdict:
    """The largest differences between the ranks of a plan and one rank, the `reference`."""
    full_tensors = {place.name: tensor for place, tensor in reference.boxes}
    boxes = [(place, box, full_tensors[place.name]) for rank in ranks for place, box in rank.boxes]
    pairs = [(a, b) for rank in ranks for a, b in zip(rank.steps, reference.steps, strict=True)]
    step_losses = (((a.loss, *a.mtp_losses), (b.loss, *b.mtp_losses)) for a, b in pairs)
    losses = [pair for losses_a, losses_b in step_losses for pair in zip(losses_a, losses_b, strict=True)]
    losses += [(rank.evaluated, reference.evaluated) for rank in ranks]
    return Verdict(
        steps=len(reference.steps),
        world=len(ranks),
        max_loss_difference=max((_difference(a, b) for a, b in losses if (a, b) != (None, None)), default=0.0),
        max_grad_norm_relative_difference=max(_norm_difference(a, b) for a, b in pairs),
        max_parameter_relative_difference=max(
            (_relative(box, full_tensor[place.slices], full_tensor) for place, box, full_tensor in boxes), default=0.0
        ),
        bitwise=all(a == b for a, b in pairs)
        and all(a == b and (a is None or math.isfinite(a)) for a, b in losses)
        and all(torch.equal(box, full_tensor[place.slices]) for place, box, full_tensor in boxes),
    )


def _difference(a: float | None, b: float | None) -> float:
    """Difference of two numbers; infinite if either is missing or not finite, because comparisons with nan are
    False."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b)


def _norm_difference(a: StepResult, b: StepResult) -> float:
    """Difference of two steps' gradient norms, as a share of the second."""
    if a.grad_norm is None or b.grad_norm is None:  # a skipped step has no norm, and must be skipped on both sides
        return 0.0 if a.grad_norm is b.grad_norm and a.skipped == b.skipped else math.inf
    return _share(_difference(a.grad_norm, b.grad_norm), abs(b.grad_norm))


def _relative(box: Tensor, expected: Tensor, full_tensor: Tensor) -> float:
    """Norm of the difference over the norm of the tensor, as if the whole tensor differed as much as this box."""
    difference = torch.linalg.vector_norm(box.double() - expected.double()).item()
    scale = torch.linalg.vector_norm(full_tensor.double()).item() * (box.numel() / full_tensor.numel()) ** 0.5
    return _share(difference, scale)


def _share(difference: float, reference: float) -> float:
    """A difference as a share of `reference`; 0 if there is none, and infinite if the reference is 0."""
    if not (math.isfinite(difference) and math.isfinite(reference)):
        return math.inf
    return difference / reference if reference > 0 else math.inf if difference else 0.0
