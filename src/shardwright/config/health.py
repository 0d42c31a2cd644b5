"""Health of a run: the things it watches, and the reaction to a fault."""

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config.base import SectionSpec
from shardwright.config.field_types import Positive, PositiveOr0, Steps, StepsOr0


class HealthSpec(SectionSpec):
    """The things a run watches of its own health, and its reaction to a fault."""

    not_finite: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="When the loss or the norm of the gradient is not a finite number: stop the run, leave the update "
        "of the step out, or go back to the last healthy checkpoint.",
    )
    most_skips: Steps = Field(
        20, description="Steps in a row that may be left out or undone by not_finite or spike; one more ends the run."
    )
    spike: Literal["tell", "skip", "rewind", "stop", "ignore"] = Field(
        "tell",
        description="When the loss leaves its band upwards: say so, leave the update of the step out, go back to the "
        "last healthy checkpoint, stop the run, or nothing.",
    )
    spike_window: Annotated[Steps, Field(ge=8)] = Field(
        100, description="Past losses that the band of the loss is made of."
    )
    spike_deviations: Positive = Field(
        8.0, description="Height of that band above its median, in deviations: median absolute ones, scaled to normal."
    )
    slow_share: PositiveOr0 = Field(
        0.25,
        description="A rank is told as slow when its steps compute longer than others' or its own past ones by more "
        "than this share of theirs; 0 means that nobody looks.",
    )
    compare_replicas_every: StepsOr0 = Field(
        0, description="Steps between comparisons of what several ranks hold alike; 0 means none."
    )
    repeat_every: StepsOr0 = Field(
        0,
        description="Steps between those that are computed twice and whose gradients are compared bit for bit; 0 means "
        "none.",
    )
