"""All-gather a stage's parameters before they are needed and release them afterwards: ZeRO-3 in a pipeline.

Parameters that are sharded over the replicas must be complete while a stage computes. The cost depends on the order of
work: a stage is gathered once for each stretch in which a rank computes with it. So a schedule that stays on a stage
for all microbatches gathers it twice a step, and a schedule that changes stages with every microbatch 2m times.
Lamy-Poirier 2023 (arXiv 2211.05953) studies that order.

A run is a stretch of computations that need the same stages: one stage, or the two of an overlapped pair. W needs no
parameters, so it belongs to no run. The gather of the next run is issued before the last computation of the present
run and travels while that computes. So at most the stages of two neighbouring runs are gathered at a time: two, or at
most four with pairs.

Gradients are sharded likewise (from ZeRO-2 on), so they can't wait for the last backward: each unit's gradients are
reduced when they are complete, and added to the shard. This happens with each microbatch, or after each stretch of B
and W of one stage, which moves fewer bytes and keeps that stage's gradients unsharded (plan.reduce_each). If a pipeline
holds a stage twice (DualPipe), the two copies are at different microbatches; then one reduction at the end stays.
"""

from dataclasses import replace

from shardwright.config.phrase import say
from shardwright.schedule.action import ADDS, COMPUTE, Action, Kind
from shardwright.schedule.schedule import AnySchedule, Schedule


def add_gathers(program: AnySchedule) -> AnySchedule:
    """A program with a G before and an L after each run, and an R after each stretch of gradients.

    ValueError for a schedule that keeps older versions of its weights, because those are not sharded.
    """
    reduced = reduce_often(program, by_microbatch=program.num_stages == 1)
    return replace(reduced, ranks=tuple(map(_with_gathers, reduced.ranks)))


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
            say(
                "schedule {name} keeps older versions of the weights, which are whole on every rank; gather the "
                'parameters of one that drains, such as "1f1b"',
                name=repr(program.name),
            )
        )


_MAY_NEED = (COMPUTE - {Kind.WEIGHT_GRAD}) | {Kind.OVERLAP}
_MAY_ADD = ADDS | {Kind.OVERLAP}


def stages_needed(action: Action) -> frozenset[int]:
    """The stages whose parameters a computation reads."""
    return frozenset(part.stage for part in action.computes() if part.kind is not Kind.WEIGHT_GRAD)


def _with_gathers(row: tuple[Action, ...]) -> tuple[Action, ...]:
    runs: list[tuple[frozenset[int], int, int]] = []  # (stages, index of the first and of the last computation)
    for index, action in enumerate(row):
        if action[0] in _MAY_NEED and (needed := stages_needed(action)):
            if runs and runs[-1][0] == needed:
                runs[-1] = needed, runs[-1][1], index
            else:
                runs.append((needed, index, index))
    if not runs:
        return row
    gathers: dict[int, list[int]] = {}  # by index: the stages to gather before the action
    releases: dict[int, list[int]] = {}
    following = [*(stages for stages, _, _ in runs[1:]), frozenset[int]()]
    for n, ((stages, first, last), next_stages) in enumerate(zip(runs, following, strict=True)):
        if n == 0:
            gathers[first] = sorted(stages)
        gathers.setdefault(last, []).extend(sorted(next_stages - stages))
        releases[last] = sorted(stages - next_stages)
    rewritten: list[Action] = []
    start = 0
    for index in sorted(gathers.keys() | releases.keys()):
        rewritten += row[start:index]
        rewritten += [Action(Kind.GATHER, stage) for stage in gathers.get(index, ())]
        rewritten.append(row[index])
        rewritten += [Action(Kind.RELEASE, stage) for stage in releases.get(index, ())]
        start = index + 1
    return (*rewritten, *row[start:])


def _reduced_by_run(row: tuple[Action, ...], by_microbatch: bool) -> tuple[Action, ...]:
    complete: dict[int, list[int]] = {}  # by index: the stages to reduce after the action
    last_index, last_stage = -1, -1
    for index, action in enumerate(row):
        if action[0] not in _MAY_ADD:
            continue
        for kind, stage, _, _, _ in action.parts or (action,):
            if kind in ADDS:
                if last_index >= 0 and (by_microbatch or stage != last_stage):
                    complete.setdefault(last_index, []).append(last_stage)
                last_index, last_stage = index, stage
    if last_index >= 0:
        complete.setdefault(last_index, []).append(last_stage)
    rewritten, due = list[Action](), list[Action]()
    for index, action in enumerate(row):
        kind = action[0]
        if due and kind is not Kind.RELEASE:  # parameters are released before the reduction needs memory
            rewritten += due
            due = []
        if kind is not Kind.REDUCE:
            rewritten.append(action)
        if index in complete:
            due += [Action(Kind.REDUCE, stage) for stage in complete[index]]
    return (*rewritten, *due)
