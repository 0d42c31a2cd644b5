"""How healthy the state after a step is: what a checkpoint of it says.

A step is healthy when its loss and its gradients are numbers, and the loss is not above its band. Its state is, when
the weights are numbers too, and the loss on held-out text, where that was measured.
"""

import math

from shardwright.train.checkpoint.manifest import HEALTHY, StateHealth
from shardwright.train.health.decision import Decision
from shardwright.train.train_step import StepResult


def step_health(step: int, result: StepResult, decision: Decision, scale_can_fall: bool) -> StateHealth | None:
    """How healthy a step is, counted from 1, on which somebody has decided; None where it says nothing: no token of it
    had a loss. Gradients of fp16 that overflow belong to how the loss scale is found, while it `can_fall`."""
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


def state_health(step: int, of_step: StateHealth, weights: str, held_out: float | None) -> StateHealth:
    """How healthy the state after a step is. `weights` is a sentence where they are not finite, and `held_out` the loss
    that was measured with them, if one was."""
    if of_step.cause == "not finite":
        return of_step
    if weights:
        return _not_finite(f"{weights} after step {step}")
    if held_out is not None and not math.isfinite(held_out):
        return _not_finite(f"the held-out loss is {held_out} after step {step}")
    return of_step


def _not_finite(sentence: str) -> StateHealth:
    return StateHealth(cause="not finite", sentence=sentence)
