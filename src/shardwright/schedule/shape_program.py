"""Orders of work by a schedule's name: the faults of a shape, and the program of a shape without faults."""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from shardwright.config import largest
from shardwright.config.base import PlanError
from shardwright.config.phrase import any_of, say
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.action import Kind
from shardwright.schedule.lowering.lower import lower, with_step
from shardwright.schedule.lowering.stage_recompute import add_recompute
from shardwright.schedule.lowering.zero3_gathers import add_gathers
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import AnySchedule, Program, Schedule
from shardwright.sharding.stage_placement import StagePlacement


def shape_faults(name: str, shape: PipelineShape) -> list[str]:
    """Why a schedule does not admit a shape, each fault with its arithmetic and a way out. Empty if it admits it."""
    facts = SCHEDULES[name]
    faults: list[str] = [
        say(
            "schedule {name} has no {field}, and it is {value}; leave it out, or use {choices}",
            name=repr(name),
            field=field,
            value=str(getattr(shape, field)),
            choices=any_of([candidate.name for candidate in SCHEDULES.values() if field in candidate.understands]),
        )
        for field in ("extra_warmup", "group", "num_steps", "most_alive")
        if getattr(shape, field) != getattr(PipelineShape, field) and field not in facts.understands
    ]
    faults = _stage_faults(name, shape.virtual_stages) + faults
    return size_faults(name, shape) or faults + facts.faults(shape)  # these may take for ever on a shape too large


def size_faults(name: str, shape: PipelineShape, num_drawn: int = 1) -> list[str]:
    """Faults of a shape that is too large to be laid out and played `num_drawn` times, each with a way out."""
    p, m, steps = shape.num_ranks, shape.num_microbatches, max(shape.num_steps, num_drawn)
    stages_each = SCHEDULES[name].stages_per_rank or shape.virtual_stages
    faults: list[str] = []
    if p > largest.PIPELINE_RANKS:
        most = largest.PIPELINE_RANKS
        faults.append(say("a pipeline of p {ranks:,} ranks is too long; use at most {most:,}", ranks=p, most=most))
    if shape.virtual_stages > largest.LAYERS:
        faults.append(
            say(
                "{pieces:,} pieces of the model on each rank are more than a model has layers; use at most {most:,}",
                pieces=shape.virtual_stages,
                most=largest.LAYERS,
            )
        )
    if p * stages_each * m * steps > largest.COMPUTATIONS:
        faults.append(_too_many_computations(p, stages_each, m, steps))
    return faults


def _too_many_computations(p: int, stages_each: int, m: int, steps: int) -> str:
    """The fault of a shape with more computations than can be laid out."""
    most = largest.COMPUTATIONS // (p * stages_each * steps)
    stages = say("p {ranks:,} stages", ranks=p)
    if stages_each > 1:
        stages = say("p {ranks:,} ranks x {stages:,} stages on each", ranks=p, stages=stages_each)
    way_out = say("at most {most:,} microbatches", most=most)
    if not most:
        way_out = say("fewer stages or steps") if steps > 1 else say("fewer stages")
    return say(
        "{stages} x m {m:,} microbatches{times} = {forwards:,} forwards, and at most {most:,} can be laid out; use "
        "{way_out}",
        stages=stages,
        m=m,
        times=say(" x {steps:,} steps", steps=steps) if steps > 1 else "",
        forwards=p * stages_each * m * steps,
        most=largest.COMPUTATIONS,
        way_out=way_out,
    )


def _stage_faults(name: str, virtual_stages: int) -> list[str]:
    facts = SCHEDULES[name]
    stages = facts.stages_per_rank
    if stages == 0:
        if virtual_stages > 1 or not facts.simpler:
            return []
        return [
            say(
                "schedule {name} runs several stages on each rank, and plan.virtual_stages is {virtual_stages}; use 2 "
                "or more, or schedule {simpler}",
                name=repr(name),
                virtual_stages=virtual_stages,
                simpler=repr(facts.simpler),
            )
        ]
    if virtual_stages in (1, stages):
        return []
    one = say("one stage of each direction") if facts.num_copies > 1 else say("one stage")
    return [
        say(
            "schedule {name} runs {count} on each rank, and plan.virtual_stages is {virtual_stages}; use {stages}",
            name=repr(name),
            count=say("two stages") if stages == 2 else one,
            virtual_stages=virtual_stages,
            stages=stages,
        )
    ]


def shape_program(
    name: str,
    shape: PipelineShape,
    recompute: str = "none",
    gathers: bool = False,
    *,
    ranks: Collection[int] | None = None,
) -> Program:
    """One optimizer step under a named schedule, all communication written out; of some `ranks` alone if given.

    If the policy `recompute` is by stage, stages keep only their inputs (stage_recompute.py); with `gathers` their
    parameters are sharded (zero3_gathers.py). PlanError says why a shape is not admitted.
    """
    return _extended(lower(_make_schedule(name, shape), ranks), recompute, gathers)


def shape_order(name: str, shape: PipelineShape, recompute: str = "none", gathers: bool = False) -> Schedule:
    """The order of work of a shape without messages. The times of a step depend on nothing more, and it is made much
    faster than the program."""
    return _extended(with_step(_make_schedule(name, shape)), recompute, gathers)


@lru_cache(maxsize=1024)
def shape_placement(name: str, shape: PipelineShape) -> StagePlacement:
    """The placement of stages on ranks. This makes the whole schedule, because a solver chooses its own placement."""
    return _make_schedule(name, shape).placement


@lru_cache(maxsize=8)
def _make_schedule(name: str, shape: PipelineShape) -> Schedule:
    faults = shape_faults(name, shape)
    if faults:
        raise PlanError(say("schedule {schedule}", schedule=name), faults)
    schedule: Schedule = SCHEDULES[name].make(shape)
    assert schedule.name == name, f"the schedule {name!r} makes one that is called {schedule.name!r}"
    return schedule


def _extended(schedule: AnySchedule, recompute: str, gathers: bool) -> AnySchedule:
    if RECOMPUTES[recompute].by_stage:
        schedule = add_recompute(schedule)
    return add_gathers(schedule) if gathers else schedule


def forward_of(program: Program) -> Program:
    """The forward passes of a program alone, for evaluation and generation: same stages, same order, and the same
    gathering of parameters."""
    rows = tuple(
        tuple(part for action in row for part in action.computes() if part.kind is Kind.FORWARD)
        for row in program.ranks
    )
    lowered = lower(Schedule("forward", program.num_microbatches, program.placement, rows))
    return replace(add_gathers(lowered) if program.gathers else lowered, sizes=program.sizes)
