"""The shape of a pipeline: the numbers from which a schedule is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement

Result = TypeVar("Result")


@dataclass(frozen=True)
class PipelineShape:
    """The numbers from which a schedule is made. Only some schedules understand the fields after `virtual_stages`."""

    num_ranks: int
    num_microbatches: int  # of one optimizer step
    virtual_stages: int = 1
    extra_warmup: int = 0  # 1f1b: further forwards before the first backward
    group: int = 0  # interleaved-1f1b: microbatches that take turns on a chunk; 0 means p
    num_steps: int = 1  # asynchronous schedules: optimizer steps in one stream, with no flush between
    most_alive: float = 0.0  # auto: microbatches whose activations a rank may keep; 0 means any number
    costs: Costs | None = None  # auto: costs of actions, by stage; None means F = I = W
    placement: StagePlacement | None = None  # auto: the placement to use; None means the best one


def of_size(make: Callable[[int, int], Result]) -> Callable[[PipelineShape], Result]:
    """Turn a function of (ranks, microbatches) into a function of a shape."""
    return lambda shape: make(shape.num_ranks, shape.num_microbatches)
