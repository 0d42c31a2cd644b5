"""The learning rate over a run: its schedules, the shapes of a decay, and rules for batch-size ramp-up.

Each is described only here, and no other file lists their names. train/train_step.py combines them. A `spec` is an
OptimizerSpec.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from shardwright.config.phrase import say
from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The learning rate after the warm-up.

    - `place` orders lists of schedules.
    - `peak_fraction(spec, step)` is the rate of a step, as a fraction of the peak; steps count from 0, the warm-up
      included.
    - `text(spec, floor, falls)` completes the sentence "The learning rate rises to its peak and ...". `floor` is the
      text of the least rate; `falls` is the text of a fall to it at the end of the run.
    - `reads` are fields of [optimizer] that not every schedule reads.
    """

    name: str
    place: int
    peak_fraction: Callable[[Any, int], float]
    text: Callable[[Any, str, str], str]
    reads: frozenset[str] = frozenset({"min_learning_rate_ratio"})


@dataclass(frozen=True, kw_only=True)
class DecayShape:
    """The shape of a decay: `remaining(progress)` falls from 1 to 0 while `progress`, the finished fraction of the
    decay, rises from 0 to 1."""

    name: str
    place: int
    remaining: Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class RampUpRule:
    """The rule by which the learning rate depends on the batch size while that grows.

    `factor(batch_fraction)` multiplies the learning rate, where `batch_fraction` is the current batch over the full
    batch. `text` completes the sentence "the learning rate ...".
    """

    name: str
    place: int
    factor: Callable[[float], float]
    text: str


RATE_SCHEDULES: Registry[RateSchedule] = Registry("a schedule of the learning rate", __name__, RateSchedule)
DECAY_SHAPES: Registry[DecayShape] = Registry("a shape of a decay", __name__, DecayShape)
RAMP_UP_RULES: Registry[RampUpRule] = Registry("a rule for growing batches", __name__, RampUpRule)
RateScheduleName = Annotated[str, NameOf(RATE_SCHEDULES)]
DecayShapeName = Annotated[str, NameOf(DECAY_SHAPES)]
RampUpRuleName = Annotated[str, NameOf(RAMP_UP_RULES)]


def _decay_fraction(spec: Any, step: int, decay_start: int, shape: str) -> float:
    """The fraction of the peak in a decay from step `decay_start` to the last step, which ends at the floor."""
    floor = float(spec.min_learning_rate_ratio)
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, spec.steps - decay_start)))
    return floor + (1.0 - floor) * DECAY_SHAPES[shape].remaining(progress)


def _wsd_fraction(spec: Any, step: int) -> float:
    return _decay_fraction(spec, step, max(spec.warmup_steps, spec.steps - spec.decay_steps), spec.decay_shape)


FACTS = (
    RateSchedule(
        name="constant",
        place=10,
        peak_fraction=lambda spec, step: 1.0,
        text=lambda spec, floor, falls: say("stays there"),
        reads=frozenset(),
    ),
    RateSchedule(
        name="linear",
        place=20,
        peak_fraction=lambda spec, step: _decay_fraction(spec, step, spec.warmup_steps, "linear"),
        text=lambda spec, floor, falls: say("{falls}, in proportion", falls=falls),
    ),
    RateSchedule(
        name="cosine",
        place=30,
        peak_fraction=lambda spec, step: _decay_fraction(spec, step, spec.warmup_steps, "cosine"),
        text=lambda spec, floor, falls: say("{falls}, as a cosine", falls=falls),
    ),
    RateSchedule(  # warm-up, stable, decay: Hu et al. 2024 (arXiv 2404.06395, section 4.2)
        name="wsd",
        place=40,
        peak_fraction=_wsd_fraction,
        text=lambda spec, floor, falls: say(
            "stays there until it {falls}, within the last {steps:,}", falls=falls, steps=spec.decay_steps
        ),
        reads=frozenset({"min_learning_rate_ratio", "decay_share", "decay_shape"}),
    ),
    RateSchedule(  # Vaswani et al. 2017 (arXiv 1706.03762, section 5.3)
        name="inverse-sqrt",
        place=50,
        peak_fraction=lambda spec, step: max(
            float(spec.min_learning_rate_ratio), math.sqrt(max(1, spec.warmup_steps) / (step + 1))
        ),
        text=lambda spec, floor, falls: say("falls with the root of the steps, not below {floor}", floor=floor),
    ),
    DecayShape(name="linear", place=10, remaining=lambda progress: 1.0 - progress),
    # Loshchilov and Hutter 2017 (arXiv 1608.03983)
    DecayShape(name="cosine", place=20, remaining=lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress))),
    # Hägele et al. 2024 (arXiv 2405.18392)
    DecayShape(name="sqrt", place=30, remaining=lambda progress: 1.0 - math.sqrt(progress)),
    RampUpRule(name="none", place=10, factor=lambda batch_fraction: 1.0, text="does not follow the batch"),
    RampUpRule(
        name="sqrt",
        place=20,
        factor=math.sqrt,
        text="follows the root of the batch (Malladi et al. 2022, for optimizers like Adam)",
    ),
    RampUpRule(
        name="linear",
        place=30,
        factor=lambda batch_fraction: batch_fraction,
        text="follows the batch in proportion (Goyal et al. 2017, for SGD)",
    ),
)
