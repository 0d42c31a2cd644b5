"""Gather a stage's parameters before they are needed and let them go after: ZeRO-3 in a pipeline.

Parameters that are sharded over the replicas must be whole while a stage computes. What that costs depends on the
order of work: a stage is gathered once for each stretch in which a rank computes with it, so a schedule that stays on
a stage for all microbatches gathers it twice a step, and one that changes stages with every microbatch 2m times.
Lamy-Poirier 2023 (arXiv 2211.05953) is about that order.

A run is a stretch of computations that need the same stages: one, or the two of an overlapped pair. W needs no
parameters, so it belongs to no run. The gather of the next run is issued before the last computation of the present
one and travels under it. So at most the stages of two neighbouring runs are there at a time: two, or with pairs at
most four.

Gradients are sharded likewise (from ZeRO-2 on), so they can't wait for the last backward: they are reduced, unit by
unit as they come, and added to the shard. That is done with each microbatch, or after each stretch of B and W of one
stage, which moves less and holds that stage's gradients whole (plan.reduce_each). Where a pipeline holds a stage twice
(DualPipe), the two copies are at different microbatches; there one reduction at the end stays.
"""

from dataclasses import replace

from shardwright.schedule.action import ADDS, Action, Kind
from shardwright.schedule.schedule import AnySchedule, Schedule


def add_gathers(program: AnySchedule) -> AnySchedule:
    """A program with a G before and an L after each run. ValueError for a schedule that keeps older versions of its
    weights: those are whole."""
    _refuse_versions(program)
    return replace(program, ranks=tuple(map(_with_gathers, program.ranks)))


def reduce_often(program: AnySchedule, by_microbatch: bool) -> AnySchedule:
    """A program with an R after each stretch of B and W of one stage, or after each B and W. ValueError for a schedule
    that keeps older versions of its weights."""
    _refuse_versions(program)
    if program.placement.num_copies > 1:
        return program
    return replace(program, ranks=tuple(_reduced_by_run(row, by_microbatch) for row in program.ranks))


def _refuse_versions(program: Schedule) -> None:
    if program.weights != "current":
        raise ValueError(
            f"schedule {program.name!r} keeps older versions of the weights, which are whole on every rank; "
            'gather the parameters of one that drains, such as "1f1b"'
        )


def stages_needed(action: Action) -> frozenset[int]:
    """The stages whose parameters a computation reads."""
    return frozenset(part.stage for part in action.computes() if part.kind is not Kind.WEIGHT_GRAD)


def _with_gathers(row: tuple[Action, ...]) -> tuple[Action, ...]:
    runs: list[tuple[frozenset[int], int, int]] = []  # the stages, and the first and the last computation
    for index, action in enumerate(row):
        if needed := stages_needed(action):
            if runs and runs[-1][0] == needed:
                runs[-1] = needed, runs[-1][1], index
            else:
                runs.append((needed, index, index))
    gathers: dict[int, list[int]] = {}  # by index: the stages to gather before the action
    releases: dict[int, list[int]] = {}
    following = [*(stages for stages, _, _ in runs[1:]), frozenset[int]()]
    for n, ((stages, first, last), coming) in enumerate(zip(runs, following, strict=True)):
        if n == 0:
            gathers[first] = sorted(stages)
        gathers.setdefault(last, []).extend(sorted(coming - stages))
        releases[last] = sorted(stages - coming)
    rewritten: list[Action] = []
    for index, action in enumerate(row):
        rewritten += [Action(Kind.GATHER, stage) for stage in gathers.get(index, ())]
        rewritten.append(action)
        rewritten += [Action(Kind.RELEASE, stage) for stage in releases.get(index, ())]
    return tuple(rewritten)


def _reduced_by_run(row: tuple[Action, ...], by_microbatch: bool) -> tuple[Action, ...]:
    additions = [
        (index, part.stage) for index, action in enumerate(row) for part in action.computes() if part.kind in ADDS
    ]
    complete: dict[int, list[int]] = {}
    for n, (index, stage) in enumerate(additions):
        if by_microbatch or n + 1 == len(additions) or additions[n + 1][1] != stage:
            complete.setdefault(index, []).append(stage)
    rewritten, due = list[Action](), list[Action]()
    for index, action in enumerate(row):
        if action.kind is not Kind.RELEASE:  # values go before memory is needed for sums
            rewritten += due
            due = []
        if action.kind is not Kind.REDUCE:
            rewritten.append(action)
        due += [Action(Kind.REDUCE, stage) for stage in complete.get(index, ())]
    return (*rewritten, *due)
