"""The optimizer: the update of weights from their gradients, and the learning rate over a run."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from shardwright.config.base import SectionSpec
from shardwright.config.field_types import Divisor, Positive, PositiveOr0, Probability, ShareOr0, Steps, StepsOr0
from shardwright.config.optimizer_facts import OPTIMIZERS, OptimizerFacts, OptimizerName
from shardwright.config.phrase import say
from shardwright.config.rate_schedules import DecayShapeName, RampUpRuleName, RateScheduleName

_WARMUP = 20
_MOST_NEWTON_SCHULZ = 20  # steps, each of three products of a matrix


class OptimizerSpec(SectionSpec):
    """The update of a step and its learning rate: a warm-up, then a schedule."""

    name: OptimizerName = Field(
        "adamw",
        description="adamw (Loshchilov and Hutter 2019), adam (weight decay in the gradient), sgd (with momentum), "
        "lion (Chen et al. 2023), adafactor (Shazeer and Stern 2018, no momentum), or muon (Jordan et al. 2024, Liu et "
        "al. 2025: matrices of the layers; AdamW for embeddings, head, norms and biases).",
    )
    learning_rate: Positive = Field(1e-3, description="Peak learning rate.")
    min_learning_rate_ratio: ShareOr0 = Field(0.1, description="Learning rate at the end, as a share of the peak.")
    warmup_steps: StepsOr0 = Field(
        _WARMUP, description="Steps of linear warm-up; left out, a tenth of the steps of a run that has fewer than it."
    )
    steps: Steps = Field(200, description="Optimizer steps of the whole run.")
    schedule: RateScheduleName = Field(
        "cosine",
        description="Learning rate after the warm-up: constant; linear or cosine down to its floor; wsd (warm-up, "
        "stable, decay: constant, and down to the floor at the end); inverse-sqrt (1 over the root of the steps, from "
        "the end of the warm-up, not below the floor).",
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="wsd: the share of the steps, at the end, in which the rate falls."
    )
    decay_shape: DecayShapeName = Field(
        "linear", description="wsd: how it falls; sqrt is by 1 less the root of what is done of the decay."
    )
    batch_rule: RampUpRuleName = Field(
        "none",
        description="How the rate follows a batch that is still growing (batch.ramp): with the root of its share of "
        "the full batch, in proportion to it, or not at all.",
    )
    weight_decay: PositiveOr0 = Field(
        0.1, description="Weight decay, decoupled but with adam and sgd; norms and biases have none."
    )
    beta1: Probability = Field(0.9, description="Decay of the first moment; lion: its share of what steps are made of.")
    beta2: Probability = Field(0.95, description="Decay of the second moment; lion: decay of its moment.")
    momentum: Probability = Field(0.95, description="Decay of the momentum of sgd and of muon, which is Nesterov's.")
    newton_schulz_steps: Annotated[int, Field(gt=0, le=_MOST_NEWTON_SCHULZ)] = Field(
        5, description="muon: steps of the Newton-Schulz iteration that makes a matrix orthogonal."
    )
    epsilon: Divisor = Field(1e-8, description="Added to the root of the second moment, with AdamW and adam.")
    clip_grad_norm: PositiveOr0 = Field(1.0, description="Largest global gradient norm; 0 means no clipping.")

    @property
    def facts(self) -> OptimizerFacts:
        """The facts of the optimizer of this name."""
        return OPTIMIZERS[self.name]

    @property
    def decay_steps(self) -> int:
        """Steps in which the rate of wsd falls, at least one."""
        return max(1, round(self.decay_share * self.steps))

    @model_validator(mode="before")
    @classmethod
    def _fit_warmup(cls, fields: Any) -> Any:
        """Shorten the default warm-up for a run with fewer steps."""
        if isinstance(fields, dict) and "warmup_steps" not in fields:
            steps = fields.get("steps")
            if isinstance(steps, int) and 0 < steps < _WARMUP:
                return fields | {"warmup_steps": shortened_warmup(steps)}
        return fields


ADAMW = OptimizerSpec()  # the default


def shortened_warmup(steps: int) -> int:
    """Steps of warm-up in a run that is shorter than its default warm-up."""
    return -(-steps // 10)


def with_fitting_warmup(optimizer: dict[str, Any], is_asked: bool) -> tuple[dict[str, Any], str]:
    """Shorten a warm-up that is longer than the run, unless the user asked for it (`is_asked`). Returns (fields of
    [optimizer], a sentence about the change or "")."""
    steps, warmup = optimizer.get("steps"), optimizer.get("warmup_steps", _WARMUP)
    if is_asked or not (isinstance(steps, int) and isinstance(warmup, int) and 0 < steps < warmup):
        return optimizer, ""
    fitting = shortened_warmup(steps)
    note = say(
        "the warm-up is {fitting} of the run's {steps} steps, for {warmup} would be more than all of them "
        "({option} for another)",
        fitting=fitting,
        steps=steps,
        warmup=warmup,
        option="--set optimizer.warmup_steps=N",
    )
    return optimizer | {"warmup_steps": fitting}, note
