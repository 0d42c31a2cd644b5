"""The health of the state after a step, for the manifest of its checkpoint.

A step is healthy if its loss and its gradients are finite, and the loss is not above its band. The state after it is
healthy if, besides, the weights are finite, and the loss on held-out text, if measured.
"""

import math

from shardwright.train.checkpoint.manifest import HEALTHY, StateHealth
from shardwright.train.health.decision import Decision
from shardwright.train.train_step import StepResult


def step_health(step: int, result: StepResult, decision: Decision, scale_can_fall: bool) -> StateHealth | None:
    """The health of a step, counted from 1, after the decision on it; None if no token of it has a loss. While
    `scale_can_fall`, an overflow of fp16 gradients is healthy: it is how the loss scale is adjusted."""
    if result.loss is None:
        return None
    if not math.isfinite(result.loss):
        return _not_finite(f"the loss is {result.loss} in step {step}")
    if decision.cause == "not finite":
        return _not_finite(f"the gradient of step {step} is not finite")
    if decision.cause == "overflow" and not scale_can_fall:
        return _not_finite(f"gradients of step {step} overflow at the least loss scale")
    if decision.cause == "spike":
        return StateHealth(cause="spike", sentence=f"the loss of step {step}, {result.loss:.4f}, is above its band")
    return HEALTHY


def state_health(step: int, of_step: StateHealth, weights: str, held_out_loss: float | None) -> StateHealth:
    """The health of the state after a step. `weights` is a sentence about weights that are not finite, "" if all are;
    `held_out_loss` is their loss on held-out text, None if not measured."""
    if of_step.cause == "not finite":
        return of_step
    if weights:
        return _not_finite(f"{weights} after step {step}")
    if held_out_loss is not None and not math.isfinite(held_out_loss):
        return _not_finite(f"the held-out loss is {held_out_loss} after step {step}")
    return of_step


def _not_finite(sentence: str) -> StateHealth:
    return StateHealth(cause="not finite", sentence=sentence)
