"""The generators by name."""

from collections.abc import Callable

from shardwright.schedule.action import Kind
from shardwright.schedule.gpipe import gpipe
from shardwright.schedule.lower import lower
from shardwright.schedule.one_f_one_b import one_f_one_b
from shardwright.schedule.schedule import Program, Schedule
from shardwright.schedule.sequential import sequential

GENERATORS: dict[str, Callable[[int, int], Schedule]] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def training_program(name: str, num_ranks: int, num_microbatches: int) -> Program:
    """One optimizer step under a named schedule, all communication written out."""
    return lower(GENERATORS[name](num_ranks, num_microbatches))


def forward_program(num_ranks: int, num_microbatches: int) -> Program:
    """The forward passes alone, as in evaluation and generation."""
    schedule = gpipe(num_ranks, num_microbatches)
    rows = tuple(tuple(action for action in row if action.kind is Kind.FORWARD) for row in schedule.ranks)
    return lower(Schedule("forward", num_microbatches, schedule.placement, rows))
