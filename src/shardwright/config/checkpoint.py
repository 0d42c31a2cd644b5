"""The checkpoints of a run: times of writing, number kept, place."""

from typing import Annotated

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import SectionSpec
from shardwright.config.field_types import Steps, StepsOr0

USUAL_EVERY_S = 1800.0  # between checkpoints where nobody says how often


class CheckpointSpec(SectionSpec):
    """The times when a run writes checkpoints, the number of those it keeps, and their place."""

    every_steps: StepsOr0 = Field(0, description="Steps between checkpoints; 0 means that steps don't matter.")
    every_s: Annotated[float, Field(ge=0, le=largest.SECONDS)] = Field(
        0.0, description="Seconds between checkpoints; 0 means that time doesn't matter."
    )
    auto: bool = Field(
        False,
        description="Write as often as loses least time: by what a checkpoint costs here and how often the cluster "
        "fails, which must be known (cluster.hours_between_failures).",
    )
    keep_last: Steps = Field(
        2,
        description="How many of the newest healthy checkpoints are kept; a newest one that is not stays beside them.",
    )
    keep_every: StepsOr0 = Field(
        0, description="A checkpoint after a multiple of so many steps is kept for ever; 0 means none is."
    )
    keep_best: str = Field(
        "",
        description="A set that is evaluated, by its name: held-out, or one of data.validation. The checkpoint with "
        "the least loss on it is kept, too.",
    )
    path: str = Field(
        "", description="Folder, or address for fsspec such as s3://bucket/run; empty: checkpoints in the run's folder."
    )

    @property
    def is_on(self) -> bool:
        """True if the run writes checkpoints."""
        return bool(self.every_steps or self.every_s or self.auto)
