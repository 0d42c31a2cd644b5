"""How far a plan is from one rank: what each rank did, and the largest differences between them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.train_step import StepResult


@dataclass(frozen=True)
class Record:
    """The result of one rank: its steps, its boxes of the parameters afterwards, and the loss of an evaluation then."""

    steps: list[StepResult]
    boxes: list[tuple[ParameterShard, Tensor]]
    evaluated: float | None


@dataclass(frozen=True)
class Verdict:
    """The largest differences between a plan and one rank.

    Losses of steps, and of an evaluation after them, differ in nats a token. A gradient norm differs relative to the
    one rank's; so does a parameter, by the norm of the difference over the norm of the whole tensor. A difference is
    infinite where a side has no number, or one of them did something that the other did not: nan, or a step left out.
    `bitwise` says that nothing differs at all, and everything is a number.
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
        """The largest of losses, of gradient norms and of parameters."""
        norm, parameter = self.max_grad_norm_relative_difference, self.max_parameter_relative_difference
        return self.max_loss_difference, norm, parameter


def compare(ranks: list[Record], one: Record) -> Verdict:
    """The largest differences between the ranks of a plan and one rank."""
    full = {place.name: tensor for place, tensor in one.boxes}
    boxes = [(place, box, full[place.name]) for rank in ranks for place, box in rank.boxes]
    pairs = [(a, b) for rank in ranks for a, b in zip(rank.steps, one.steps, strict=True)]
    of_steps = (((a.loss, *a.mtp_losses), (b.loss, *b.mtp_losses)) for a, b in pairs)
    losses = [both for of_a, of_b in of_steps for both in zip(of_a, of_b, strict=True)]
    losses += [(rank.evaluated, one.evaluated) for rank in ranks]
    return Verdict(
        steps=len(one.steps),
        world=len(ranks),
        max_loss_difference=max((_difference(a, b) for a, b in losses if (a, b) != (None, None)), default=0.0),
        max_grad_norm_relative_difference=max(_norm_difference(a, b) for a, b in pairs),
        max_parameter_relative_difference=max(
            (_relative(box, whole[place.slices], whole) for place, box, whole in boxes), default=0.0
        ),
        bitwise=all(a == b for a, b in pairs)
        and all(a == b and (a is None or math.isfinite(a)) for a, b in losses)
        and all(torch.equal(box, whole[place.slices]) for place, box, whole in boxes),
    )


def _difference(a: float | None, b: float | None) -> float:
    """Difference of two numbers, infinite where one of them is none, for nan compares as if it were right; or where one
    of them is missing."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b)


def _norm_difference(a: StepResult, b: StepResult) -> float:
    """Difference of two steps' gradient norms, as a share of the second."""
    if a.grad_norm is None or b.grad_norm is None:  # a step left out has none, and then so for both
        return 0.0 if a.grad_norm is b.grad_norm and a.skipped == b.skipped else math.inf
    return _share(_difference(a.grad_norm, b.grad_norm), abs(b.grad_norm))


def _relative(box: Tensor, wanted: Tensor, full: Tensor) -> float:
    """Norm of the difference over the norm of the tensor, for a box as if the whole tensor differed like it."""
    difference = torch.linalg.vector_norm(box.double() - wanted.double()).item()
    scale = torch.linalg.vector_norm(full.double()).item() * (box.numel() / full.numel()) ** 0.5
    return _share(difference, scale)


def _share(difference: float, of: float) -> float:
    """A difference as a share; no difference is none of anything, and a difference from 0 is infinite."""
    if not (math.isfinite(difference) and math.isfinite(of)):
        return math.inf
    return difference / of if of > 0 else math.inf if difference else 0.0
