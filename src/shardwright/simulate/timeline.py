"""The actions of each rank over time, the causes of its waits, and the memory that it keeps meanwhile.

A rank's time is cut without a gap into computing and waiting, and each wait has one cause:

    warm-up        before its first computation of a step
    dependency     another rank has not yet computed the input
    communication  the input is computed, and its message is in transit
    drain          after its last computation, until the last rank has ended the step

The times may be simulated or recorded: only the program and the times are read, not the costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from shardwright.schedule.action import COMPUTE, RECV, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, Product
from shardwright.schedule.lowering.zero3_gathers import stages_needed
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Times
from shardwright.simulate.action_columns import Array, Columns
from shardwright.simulate.buffer_curves import Kept, kept_on_rank


class Resource(StrEnum):
    """The resource that an action occupies: the resources of one rank work in parallel. Arrivals and releases occupy
    none."""

    COMPUTE = "compute"
    FORWARD_LINK = "forward link"
    BACKWARD_LINK = "backward link"
    COLLECTIVES = "collectives"
    ARRIVAL = "arrival"
    RELEASE = "release"


class Cause(StrEnum):
    """The reason why a rank does not compute."""

    WARM_UP = "warm-up"
    COMMUNICATION = "communication"
    DEPENDENCY = "dependency"
    DRAIN = "drain"


# Computations and the update occupy the rank's compute.
_RESOURCES = dict.fromkeys(RECV, Resource.ARRIVAL) | {
    Kind.SEND_FORWARD: Resource.FORWARD_LINK,
    Kind.SEND_BACKWARD: Resource.BACKWARD_LINK,
    Kind.REDUCE: Resource.COLLECTIVES,
    Kind.GATHER: Resource.COLLECTIVES,
    Kind.RELEASE: Resource.RELEASE,
}


@dataclass(frozen=True, slots=True)
class Span:
    """An action and its time. A receive runs from the departure of the message until its arrival."""

    action: Action
    start: float
    end: float
    resource: Resource
    step: int


@dataclass(frozen=True, slots=True)
class Idle:
    """A wait of a rank's compute."""

    cause: Cause
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """One rank's part. `kept` is what it holds in memory, by kind of buffer. `columns` are the actions of one step.

    Actions of all steps are in three columns, because there may be millions; `computations` and `updates` are the
    indices of those that occupy its compute; `spans` has all facts of each action.
    """

    actions: tuple[Action, ...]
    columns: Columns
    starts: Array
    ends: Array
    num_steps: int
    computations: Array
    updates: Array
    idle: tuple[Idle, ...]
    kept: dict[Buffer, Kept]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action with its times, resource and step."""
        length = len(self.actions) // self.num_steps
        resources = (_RESOURCES.get(action.kind, Resource.COMPUTE) for action in self.actions)
        timed = zip(self.actions, self.starts.tolist(), self.ends.tolist(), resources, strict=True)
        return tuple(Span(*fields, step=n // length) for n, fields in enumerate(timed))

    def work(self, scale: float) -> Iterator[tuple[Action, float, float]]:
        """Computations and updates that are visible at `scale` columns per unit of time, with their start and end."""
        indices = self.worked
        visible = indices[np.rint(self.starts[indices] * scale) != np.rint(self.ends[indices] * scale)]
        actions = map(self.actions.__getitem__, visible.tolist())
        yield from zip(actions, self.starts[visible].tolist(), self.ends[visible].tolist(), strict=True)

    def lengths(self, which: Array) -> Array:
        """The durations of some actions, given by index."""
        seconds: Array = self.ends[which] - self.starts[which]
        return seconds

    @cached_property
    def worked(self) -> Array:
        """Indices of computations and updates, in order."""
        return np.union1d(self.computations, self.updates)

    @property
    def busy(self) -> float:
        """Time in computation, with the optimizer's."""
        return float(sum(self.lengths(self.worked).tolist()))

    def idle_by_cause(self) -> dict[Cause, float]:
        """Time of every cause; with `busy` they add up to the makespan."""
        by_cause: dict[Cause, float] = dict.fromkeys(Cause, 0)
        for gap in self.idle:
            by_cause[gap.cause] += gap.end - gap.start
        return by_cause


@dataclass(frozen=True)
class Timeline:
    """All ranks of a program, over one or more steps that ran back to back."""

    program: Program
    makespan: float
    ranks: tuple[RankTimeline, ...]


def make_timeline(program: Program, times: Times) -> Timeline:
    """Explain the times of a program."""
    num_steps = times.num_steps(program)
    context = _Context(program, times, num_steps)
    ranks = []
    for rank, (row, columns) in enumerate(zip(program.ranks, context.columns, strict=True)):
        firsts = len(row) * np.arange(num_steps)
        computations, updates = (
            (firsts[:, None] + np.unique(columns.of_kinds(*kinds).at)).ravel() for kinds in (COMPUTE, (Kind.STEP,))
        )
        starts, ends, idle = context.starts[rank], context.ends[rank], tuple(context.waits(rank))
        kept = kept_on_rank(columns, program.trains, program.sizes, starts, ends=ends, num_steps=num_steps)
        timed = times.rows[rank], columns, starts, ends, num_steps
        ranks.append(RankTimeline(*timed, computations=computations, updates=updates, idle=idle, kept=kept))
    return Timeline(program, times.makespan, tuple(ranks))


class _Context:
    """All times, in tables that explain a wait.

    For each step, by product and stage x microbatches + microbatch: the time at which the product was made, and at
    which it arrived. 0 if it never was.
    """

    def __init__(self, program: Program, times: Times, num_steps: int) -> None:
        self._program, self._times, self._m = program, times, program.num_microbatches
        self.columns = [Columns.of(row, self._m) for row in program.ranks]
        self.starts, self.ends = ([np.array(moments) for moments in rows] for rows in (times.start, times.end))
        self._made, self._arrived = np.zeros((2, len(Product), num_steps, program.num_stages * self._m))
        self._complete = np.zeros((num_steps, program.num_stages))  # when a stage's gradients are, in all its copies
        self._end_of_step = [0.0] * num_steps
        makers = [[kind for kind in MAKES if MAKES[kind] is product] for product in Product]
        receives = [[MESSAGES[product][1]] for product in Product]
        tables = [*zip(self._made, makers, strict=True), *zip(self._arrived, receives, strict=True)]
        for columns, ended in zip(self.columns, self.ends, strict=True):
            filled = [(table, columns.of_kinds(*kinds)) for table, kinds in tables]
            additions = columns.of_kinds(Kind.BACKWARD, Kind.WEIGHT_GRAD)
            for step, ends in enumerate(ended.reshape(num_steps, -1)):
                self._end_of_step[step] = max(self._end_of_step[step], float(ends.max(initial=0.0)))
                for table, moments in filled:
                    table[step, moments.pair] = ends[moments.at]
                np.maximum.at(self._complete[step], additions.stage, ends[additions.at])

    def waits(self, rank: int) -> list[Idle]:
        """A rank's waits, in order; adjacent waits with one cause are merged."""
        merged: list[Idle] = []
        for wait in self._pieces(rank):
            if wait.start >= wait.end:
                continue
            if merged and merged[-1].end == wait.start and merged[-1].cause is wait.cause:
                wait = Idle(wait.cause, merged.pop().start, wait.end)
            merged.append(wait)
        return merged

    def _pieces(self, rank: int) -> Iterator[Idle]:
        """Every stretch between computations, cut where its cause changes."""
        row, columns = self._program.ranks[rank], self.columns[rank]
        computations, gathers = columns.of_kinds(*COMPUTE).at, columns.of_kinds(Kind.GATHER)
        first_n, last_n = (int(computations[0]), int(computations[-1])) if len(computations) else (-1, -1)
        work = np.unique(columns.of_kinds(*COMPUTE, Kind.STEP).at)
        reductions, num_steps = _reductions_by_update(columns), len(self._end_of_step)
        began, ended = (rows.reshape(num_steps, -1)[:, work].ravel() for rows in (self.starts[rank], self.ends[rank]))
        for place in np.flatnonzero(began > np.append(0.0, ended[:-1])).tolist():
            step, n = place // len(work), int(work[place % len(work)])
            free_from, start, action = float(ended[place - 1]) if place else 0.0, float(began[place]), row[n]
            if action.kind is Kind.STEP:
                otherwise = Cause.DRAIN if n > last_n else Cause.DEPENDENCY
                yield from _cut(free_from, start, *self._reduced(rank, step, reductions[n], free_from), otherwise)
            elif n == first_n:
                previous_end = self._end_of_step[step - 1] if step else 0.0
                border = min(max(previous_end, free_from), start)
                yield Idle(Cause.DRAIN, free_from, border)
                yield Idle(Cause.WARM_UP, border, start)
            else:
                gathered = self._gathered(gathers, self.ends[rank][step * len(row) :], n, action)
                yield from _cut(free_from, start, *self._inputs(action, step, free_from, gathered), Cause.DEPENDENCY)
        yield Idle(Cause.DRAIN, float(ended[-1]) if len(ended) else 0.0, max(self._end_of_step))

    def _inputs(self, action: Action, step: int, free_from: float, gathered: float) -> tuple[float, float]:
        """When the last input of a computation was computed, and when all had arrived, parameters included."""
        computed, arrived = free_from, max(free_from, gathered)
        for part in action.computes():
            n = part.stage * self._m + part.microbatch
            for need in NEEDS[part.kind]:
                if need.stage:
                    arrived = max(arrived, float(self._arrived[need.product, step, n]))
                    if 0 <= part.stage + need.stage < self._program.num_stages:
                        computed = max(computed, float(self._made[need.product, step, n + need.stage * self._m]))
        return computed, arrived

    def _gathered(self, gathers: Columns, ends: Array, n: int, action: Action) -> float:
        """The end of the last gather before action n that it needs. `ends` are those of the actions of its step."""
        latest = 0.0
        for stage in stages_needed(action) if len(gathers.at) else ():
            stage_gathers = gathers.at[gathers.stage == stage]
            num_before = int(np.searchsorted(stage_gathers, n))
            if num_before:
                latest = max(latest, float(ends[stage_gathers[num_before - 1]]))
        return latest

    def _reduced(self, rank: int, step: int, reductions: list[int], free_from: float) -> tuple[float, float]:
        """When the gradients that an optimizer step waits for were complete, and when they were reduced."""
        row, ends = self._program.ranks[rank], self._times.end[rank]
        complete = [float(self._complete[step, row[index].stage]) for index in reductions if row[index].microbatch < 0]
        return max([free_from, *complete]), max([free_from, *(ends[step * len(row) + index] for index in reductions)])


def _reductions_by_update(columns: Columns) -> dict[int, list[int]]:
    """The reductions of gradients that each optimizer step waits for: those since the previous step. Keys and values
    are indices of actions."""
    reductions: dict[int, list[int]] = {}
    pending: list[int] = []
    marks = columns.of_kinds(Kind.REDUCE, Kind.STEP)
    for index, is_update in zip(marks.at.tolist(), marks.are_of(Kind.STEP).tolist(), strict=True):
        if is_update:
            reductions[index], pending = pending, []
        else:
            pending.append(index)
    return reductions


def _cut(start: float, end: float, computed: float, arrived: float, otherwise: Cause) -> Iterator[Idle]:
    computed = min(computed, end)
    arrived = min(max(computed, arrived), end)
    yield Idle(otherwise, start, computed)
    yield Idle(Cause.COMMUNICATION, computed, arrived)
    yield Idle(otherwise, arrived, end)
