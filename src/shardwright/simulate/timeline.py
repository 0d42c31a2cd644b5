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
from functools import cached_property, partial
from math import inf

import numpy as np

from shardwright.config.kept_results import kept_by_identity
from shardwright.schedule.action import COMPUTE, RECV, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, Product
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Times
from shardwright.simulate.action_columns import Array, Columns
from shardwright.simulate.buffer_curves import Kept, LivesByBuffer, kept_on_rank, lives_on_rank


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


CAUSES = tuple(Cause)  # by the number that columns have of them
_WARM_UP, _COMMUNICATION, _DEPENDENCY, _DRAIN = map(CAUSES.index, CAUSES)

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
class Waits:
    """The waits of a rank's compute in order, as columns: the number of the cause, the start and the end."""

    cause: Array
    start: Array
    end: Array

    def merged(self) -> "Waits":
        """The waits that last, where adjacent ones with one cause are one."""
        lasts = self.start < self.end
        cause, start, end = self.cause[lasts], self.start[lasts], self.end[lasts]
        goes_on = (cause[1:] == cause[:-1]) & (start[1:] == end[:-1])
        is_first, is_last = np.append(True, ~goes_on)[: len(cause)], np.append(~goes_on, True)[: len(cause)]
        return Waits(cause[is_first], start[is_first], end[is_last])


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
    waits: Waits
    kept: dict[Buffer, Kept]

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The waits, one by one."""
        columns = self.waits.cause.tolist(), self.waits.start.tolist(), self.waits.end.tolist()
        return tuple(Idle(CAUSES[cause], start, end) for cause, start, end in zip(*columns, strict=True))

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
        return np.sort(np.concatenate([self.computations, self.updates]))

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
    context, lives = _Context(program, times, num_steps), _lives_by_rank(program)
    ranks = []
    for rank, (row, columns) in enumerate(zip(program.ranks, context.columns, strict=True)):
        firsts = len(row) * np.arange(num_steps)
        computations, updates = (
            (firsts[:, None] + columns.actions_of(*kinds)).ravel() for kinds in (COMPUTE, (Kind.STEP,))
        )
        starts, ends, waits = context.starts[rank], context.ends[rank], context.waits(rank)
        kept = kept_on_rank(lives[rank], program.sizes, starts, ends, num_steps)
        timed = times.rows[rank], columns, starts, ends, num_steps
        ranks.append(RankTimeline(*timed, computations=computations, updates=updates, waits=waits, kept=kept))
    return Timeline(program, times.makespan, tuple(ranks))


@partial(kept_by_identity, most=4)  # a page asks for many timelines of one program
def columns_by_rank(program: Program) -> tuple[Columns, ...]:
    """The actions of each rank, as columns."""
    return tuple(Columns.of(row, program.num_microbatches) for row in program.ranks)


@partial(kept_by_identity, most=4)
def _lives_by_rank(program: Program) -> tuple[LivesByBuffer, ...]:
    """The buffers of each rank."""
    return tuple(lives_on_rank(columns, program.trains) for columns in columns_by_rank(program))


class _Context:
    """All times, in tables that explain a wait.

    For each step, by product and stage x microbatches + microbatch: the time at which the product was made, and at
    which it arrived. 0 if it never was.
    """

    def __init__(self, program: Program, times: Times, num_steps: int) -> None:
        self._program, self._times, self._m = program, times, program.num_microbatches
        self.columns = columns_by_rank(program)
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

    def waits(self, rank: int) -> Waits:
        """A rank's waits, cut where their cause changes."""
        columns, num_steps = self.columns[rank], len(self._end_of_step)
        work = columns.actions_of(*COMPUTE, Kind.STEP)
        began, ended = (rows.reshape(num_steps, -1)[:, work].ravel() for rows in (self.starts[rank], self.ends[rank]))
        free = np.append(0.0, ended)
        places = np.flatnonzero(began > free[:-1])
        step, action = places // max(1, len(work)), work[places % max(1, len(work))]
        # Each wait is for a computation, for its message, and again for others, between four moments.
        inputs = (table[step, action] for table in self._inputs(rank))
        computed, arrived = (np.maximum(moments, free[places]) for moments in inputs)
        causes = np.tile([_DEPENDENCY, _COMMUNICATION, _DEPENDENCY], (len(places), 1))
        self._explain_ends(rank, (step, action, free[places]), (computed, arrived), causes)
        computed = np.minimum(computed, began[places])
        arrived = np.clip(arrived, computed, began[places])
        moments = np.stack([free[places], computed, arrived, began[places]], -1)
        return Waits(
            np.append(causes.ravel(), _DRAIN),
            np.append(moments[:, :-1].ravel(), free[-1]),
            np.append(moments[:, 1:].ravel(), max(self._end_of_step)),
        ).merged()

    def _explain_ends(
        self, rank: int, waits: tuple[Array, Array, Array], inputs: tuple[Array, Array], causes: Array
    ) -> None:
        """Write the causes of waits for updates and for a step's first computation, and when their inputs were computed
        and had arrived. `waits` are the steps, the actions, and when the rank was free."""
        row, columns, (computed, arrived) = self._program.ranks[rank], self.columns[rank], inputs
        computations, reductions = columns.actions_of(*COMPUTE), _reductions_by_update(columns)
        first_n, last_n = (int(computations[0]), int(computations[-1])) if len(computations) else (-1, -1)
        ends = {first_n, *reductions}
        for place in [place for place, n in enumerate(waits[1].tolist()) if n in ends]:
            step, n, free_from = (column[place].item() for column in waits)
            if row[n].kind is Kind.STEP:
                causes[place, ::2] = _DRAIN if n > last_n else _DEPENDENCY
                computed[place], arrived[place] = self._reduced(rank, step, reductions[n], free_from)
            else:  # the last ranks end the step before, then the first ones begin this step
                causes[place] = _DRAIN, _WARM_UP, _WARM_UP
                computed[place], arrived[place] = max(self._end_of_step[step - 1] if step else 0.0, free_from), inf

    def _inputs(self, rank: int) -> tuple[Array, Array]:
        """When the last input from another stage was computed, and when all inputs had arrived, parameters included; by
        step and action of a rank."""
        columns, shape = self.columns[rank], (len(self._end_of_step), len(self._program.ranks[rank]))
        computed, arrived = np.zeros(shape), np.zeros(shape)
        for kind, needs in NEEDS.items():
            takers = columns.of_kinds(kind)
            for need in needs if len(takers.at) else ():
                if need.stage:
                    _note_later(arrived, takers.at, self._arrived[need.product][:, takers.pair])
                    stage = takers.stage + need.stage
                    made = takers.where((stage >= 0) & (stage < self._program.num_stages))
                    _note_later(computed, made.at, self._made[need.product][:, made.pair + need.stage * self._m])
        gathers = columns.of_kinds(Kind.GATHER)
        for stage in sorted(set(gathers.stage.tolist())):  # the last gather before an action serves it
            readers = columns.of_kinds(*COMPUTE - {Kind.WEIGHT_GRAD})
            read_at, gathered_at = readers.at[readers.stage == stage], gathers.at[gathers.stage == stage]
            num_before = np.searchsorted(gathered_at, read_at)
            served, last = read_at[num_before > 0], gathered_at[num_before[num_before > 0] - 1]
            _note_later(arrived, served, self.ends[rank].reshape(shape)[:, last])
        return computed, arrived

    def _reduced(self, rank: int, step: int, reductions: list[int], free_from: float) -> tuple[float, float]:
        """When the gradients that an optimizer step waits for were complete, and when they were reduced."""
        row, ends = self._program.ranks[rank], self._times.end[rank]
        complete = [float(self._complete[step, row[index].stage]) for index in reductions if row[index].microbatch < 0]
        return max([free_from, *complete]), max([free_from, *(ends[step * len(row) + index] for index in reductions)])


@partial(kept_by_identity, most=256)
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


def _note_later(table: Array, actions: Array, moments: Array) -> None:
    """Write moments, by step and action, into a table where they are later than what it has."""
    table[:, actions] = np.maximum(table[:, actions], moments)
