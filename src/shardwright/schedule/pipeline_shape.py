"""The shape of a pipeline: numbers that a schedule is made for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement

Made = TypeVar("Made")


@dataclass(frozen=True)
class PipelineShape:
    """The numbers that a schedule is made for. Those after the virtual stages are each understood by some schedules."""

    num_ranks: int
    num_microbatches: int  # of one optimizer step
    virtual_stages: int = 1
    extra_warmup: int = 0  # 1f1b: more forwards before the first backward
    group: int = 0  # interleaved-1f1b: microbatches that take turns on a chunk; 0 is p
    num_steps: int = 1  # asynchronous schedules: optimizer steps in one stream, with no flush between
    most_alive: float = 0.0  # auto: microbatches whose activations a rank may keep; 0 is any number
    costs: Costs | None = None  # auto: what it is made for, by stage; none is F = I = W
    placement: StagePlacement | None = None  # auto: where the stages lie already; none is where that is best


def of_size(make: Callable[[int, int], Made]) -> Callable[[PipelineShape], Made]:
    """Return a function of a shape that reads its numbers of ranks and microbatches alone."""
    return lambda shape: make(shape.num_ranks, shape.num_microbatches)
