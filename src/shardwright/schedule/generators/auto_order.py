"""An order made by the solver (schedule/solver) for the given time of each stage and a limit on each rank's memory."""

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.config import largest
from shardwright.config.array_math import where
from shardwright.config.base import error_text
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.one_f_one_b import alive
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import looped

if TYPE_CHECKING:
    from shardwright.schedule.solver.auto_model import Model


def _auto(shape: PipelineShape) -> Schedule:
    from shardwright.schedule.solver.auto import auto  # the solver is as large as all other schedules together

    return auto(replace(_model(shape), placement=shape.placement))


def _model(shape: PipelineShape) -> "Model":
    from shardwright.schedule.solver.auto_model import Model

    limit = shape.most_alive or None
    return Model(shape.num_ranks, shape.num_microbatches, shape.costs, limit, stages_per_rank=shape.virtual_stages)


def _auto_faults(shape: PipelineShape) -> list[str]:
    if shape.virtual_stages > 2:
        return [
            say(
                "schedule 'auto' runs one or two stages on each rank, and v is {stages}; use 1 or 2",
                stages=shape.virtual_stages,
            )
        ]
    p, m, num_stages = shape.num_ranks, shape.num_microbatches, shape.num_ranks * shape.virtual_stages
    if num_stages * m > largest.SEARCHED:
        return [
            say(
                "schedule 'auto' searches for an order, and p {p:,} x v {v} stages x m {m:,} = {forwards:,} forwards "
                "are more than {searched:,}; use at most {most:,} microbatches, or a schedule by rule, such as 'zb-v' "
                "or '1f1b'",
                p=p,
                v=shape.virtual_stages,
                m=m,
                forwards=num_stages * m,
                searched=largest.SEARCHED,
                most=max(1, largest.SEARCHED // num_stages),
            )
        ]
    try:
        _model(shape)
    except ValueError as error:
        return [error_text(error)]
    return []


FACTS = ScheduleFacts(
    name="auto",
    place=150,
    make=_auto,
    faults=_auto_faults,
    understands=("most_alive", "costs", "placement"),
    stages_per_rank=0,
    placement=looped,
    splits_weights=True,
    alive=alive,
    num_gathers=lambda p, m, v: where(v > 1, 1.0 * m, 1.0),
    num_waits=lambda p, m, v, extra_warmup: where(v > 1, 5.0 * p - 7, 2.0 * (p - 1)),
    not_searched="a solver makes it for one plan",
)
