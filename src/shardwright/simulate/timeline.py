"""The actions of each rank over time, the causes of its waits, and the memory that it keeps meanwhile.

A rank's time is cut without a gap into computing and waiting (`simulate/waits.py`). The times may be simulated or
recorded: only the program and the times are read, not the costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial

import numpy as np

from shardwright.config.kept_results import kept_by_identity
from shardwright.layers.arrays import Array
from shardwright.schedule.action import COMPUTE, RECV, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Times
from shardwright.simulate.action_columns import Columns, columns_by_rank
from shardwright.simulate.buffer_curves import Kept, LivesByBuffer, kept_on_rank, lives_on_rank
from shardwright.simulate.waits import CAUSES, Cause, Waits, waits_by_rank


class Resource(StrEnum):
    """The resource that an action occupies: the resources of one rank work in parallel. Arrivals and releases occupy
    none."""

    COMPUTE = "compute"
    FORWARD_LINK = "forward link"
    BACKWARD_LINK = "backward link"
    COLLECTIVES = "collectives"
    ARRIVAL = "arrival"
    RELEASE = "release"


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
    all_starts, all_ends = (  # of a list, twice as fast as np.array
        [np.fromiter(moments, float, len(moments)) for moments in rows] for rows in (times.start, times.end)
    )
    all_waits, lives = waits_by_rank(program, all_starts, all_ends, num_steps), _lives_by_rank(program)
    ranks = []
    for rank, (row, columns) in enumerate(zip(program.ranks, columns_by_rank(program), strict=True)):
        firsts = len(row) * np.arange(num_steps)
        computations, updates = (
            (firsts[:, None] + columns.actions_of(*kinds)).ravel() for kinds in (COMPUTE, (Kind.STEP,))
        )
        starts, ends, waits = all_starts[rank], all_ends[rank], all_waits[rank]
        kept = kept_on_rank(lives[rank], program.sizes, starts, ends, num_steps)
        timed = times.rows[rank], columns, starts, ends, num_steps
        ranks.append(RankTimeline(*timed, computations=computations, updates=updates, waits=waits, kept=kept))
    makespan = max((float(ends.max(initial=0.0)) for ends in all_ends), default=0.0)
    return Timeline(program, makespan, tuple(ranks))


@partial(kept_by_identity, most=4)
def _lives_by_rank(program: Program) -> tuple[LivesByBuffer, ...]:
    """The buffers of each rank."""
    return tuple(lives_on_rank(columns, program.trains) for columns in columns_by_rank(program))
