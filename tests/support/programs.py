"""Schedules by name, for shapes that are written in a line."""

from typing import Any

from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Program, Schedule
from shardwright.schedule.shape_program import shape_faults, shape_program


def training_program(
    name: str, p: int, m: int, v: int = 1, recompute: Any = "none", gathers: bool = False, **fields: Any
) -> Program:
    """The program of p ranks, m microbatches and v stages a rank; `fields` are others of a shape."""
    return shape_program(name, PipelineShape(p, m, v, **fields), recompute, gathers)


def schedule_faults(name: str, p: int, m: int, v: int = 1, **fields: Any) -> list[str]:
    """Why the schedule does not admit such a shape."""
    return shape_faults(name, PipelineShape(p, m, v, **fields))


def generated(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule alone, before it is lowered."""
    return SCHEDULES[name].make(PipelineShape(p, m, v))
