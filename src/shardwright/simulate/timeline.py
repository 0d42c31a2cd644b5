"""What each rank does and when, why it waits in between, and what it keeps in memory meanwhile.

A rank's time is cut without a gap into computing and waiting, and each wait has one cause:

    warm-up        before its first computation of a step
    dependency     another rank has not yet computed what this one needs
    communication  it has, and the message is on its way
    drain          after its last computation, until the last rank has ended the step

The times may be simulated or recorded: only the program and the times are read, not the costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.schedule.action import COMPUTE, RECV, Action, Kind
from shardwright.schedule.lives import Buffer, Life, lives, num_bytes
from shardwright.schedule.schedule import Program
from shardwright.schedule.sizes import Sizes
from shardwright.schedule.timing import Times

Array = npt.NDArray[Any]


class Resource(StrEnum):
    """What an action occupies: resources of one rank work side by side. Arrivals and releases occupy nothing."""

    COMPUTE = "compute"
    FORWARD_LINK = "forward link"
    BACKWARD_LINK = "backward link"
    COLLECTIVES = "collectives"
    ARRIVAL = "arrival"
    RELEASE = "release"


class Cause(StrEnum):
    """Why a rank does not compute."""

    WARM_UP = "warm-up"
    COMMUNICATION = "communication"
    DEPENDENCY = "dependency"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran. A receive runs from when the message has left until it is there."""

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


Curve = tuple[tuple[float, int], ...]  # (from when, how many), in order of time; 0 before the first


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """All buffers of one kind on a rank: their number and their bytes over time, in arrays; None where bytes are not
    known."""

    times: Array
    counts: Array
    sizes: Array | None

    @property
    def count(self) -> Curve:
        """Their number over time."""
        return tuple(zip(self.times.tolist(), self.counts.tolist(), strict=True))

    @property
    def num_bytes(self) -> Curve | None:
        """Their bytes over time."""
        return None if self.sizes is None else tuple(zip(self.times.tolist(), self.sizes.tolist(), strict=True))

    @property
    def most(self) -> int:
        """Most at once."""
        return int(self.counts.max(initial=0))

    @property
    def most_bytes(self) -> int | None:
        """Most bytes at once."""
        return None if self.sizes is None else int(self.sizes.max(initial=0))


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """One rank's part. `kept` is what it holds in memory, by kind of buffer.

    Actions of all steps are in three lists, because there may be millions; `spans` says more of each.
    """

    actions: tuple[Action, ...]
    starts: list[float]
    ends: list[float]
    num_steps: int
    idle: tuple[Idle, ...]
    kept: dict[Buffer, Kept]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action with all that is known of it."""
        length = len(self.actions) // self.num_steps
        timed = zip(self.actions, self.starts, self.ends, strict=True)
        return tuple(Span(a, t0, t1, _resource(a), n // length) for n, (a, t0, t1) in enumerate(timed))

    def work(self) -> Iterator[tuple[Action, float, float]]:
        """Computations and updates, with their start and end."""
        for timed in zip(self.actions, self.starts, self.ends, strict=True):
            if timed[0].kind in _OF_COMPUTE:
                yield timed

    @property
    def alive(self) -> Curve:
        """(stage, microbatch) pairs whose activations are kept."""
        return self.kept[Buffer.ACTIVATIONS].count

    @property
    def buffered(self) -> Curve:
        """Messages that have arrived and that no computation has taken yet."""
        return self.kept[Buffer.MESSAGE].count

    @property
    def busy(self) -> float:
        """Time in computation, the optimizer's included."""
        return sum(end - start for _, start, end in self.work())

    def idle_by_cause(self) -> dict[Cause, float]:
        """Time of every cause; with `busy` they add up to the makespan."""
        found: dict[Cause, float] = dict.fromkeys(Cause, 0)
        for gap in self.idle:
            found[gap.cause] += gap.end - gap.start
        return found


@dataclass(frozen=True)
class Timeline:
    """All ranks of a program, over one or more steps that ran back to back."""

    program: Program
    num_steps: int
    makespan: float
    ranks: tuple[RankTimeline, ...]


def make_timeline(program: Program, times: Times) -> Timeline:
    """Explain the times of a program."""
    num_steps = len(times.rows[0]) // len(program.ranks[0])
    context = _Context(program, times, num_steps)
    ranks = [
        RankTimeline(
            times.rows[rank], times.start[rank], times.end[rank], num_steps, tuple(context.waits(rank)),
            _kept(program, rank, times, num_steps),
        )
        for rank in range(len(program.ranks))
    ]  # fmt: skip
    return Timeline(program, num_steps, times.makespan, tuple(ranks))


_OF_COMPUTE = COMPUTE | {Kind.OVERLAP, Kind.STEP}


def _resource(action: Action) -> Resource:
    if action.kind is Kind.SEND_FORWARD:
        return Resource.FORWARD_LINK
    if action.kind is Kind.SEND_BACKWARD:
        return Resource.BACKWARD_LINK
    if action.kind in RECV:
        return Resource.ARRIVAL
    if action.kind is Kind.RELEASE:
        return Resource.RELEASE
    return Resource.COLLECTIVES if action.kind in (Kind.REDUCE, Kind.GATHER) else Resource.COMPUTE


_LOCAL = frozenset({Kind.WEIGHT_GRAD, Kind.RECOMPUTE})  # they take no message and make none


class _Context:
    """All times, and what is looked up in them to explain a wait.

    Of each step, by stage x microbatches + microbatch, when something was computed and when it was there: ahead, the
    output of a forward and the input of one; back, the input gradient that a backward makes and the one that it takes.
    What never was is at 0.
    """

    def __init__(self, program: Program, times: Times, num_steps: int) -> None:
        self._program, self._times, self._m = program, times, program.num_microbatches
        num_pairs, m = program.num_stages * program.num_microbatches, program.num_microbatches
        nothing = [0.0] * num_pairs
        self._computed_ahead, self._computed_back, self._arrived_ahead, self._arrived_back = (
            [nothing[:] for _ in range(num_steps)] for _ in range(4)
        )
        self._complete: dict[tuple[int, int], float] = {}  # (stage, step): when the gradients of all copies are
        self._end_of_step = [0.0] * num_steps
        for row, ends in zip(program.ranks, times.end, strict=True):
            for step in range(num_steps):
                ahead, back = self._computed_ahead[step], self._computed_back[step]
                there_ahead, there_back = self._arrived_ahead[step], self._arrived_back[step]
                ends_here = ends[step * len(row) : (step + 1) * len(row)]
                self._end_of_step[step] = max([self._end_of_step[step], *ends_here])
                added: dict[int, float] = {}  # by stage: the end of the last addition to its gradients
                for action, end in zip(row, ends_here, strict=True):
                    for kind, stage, i, _, _ in action.parts or (action,):
                        if kind is Kind.FORWARD:
                            ahead[stage * m + i] = end
                        elif kind is Kind.RECV_FORWARD:
                            there_ahead[stage * m + i] = end
                        elif kind is Kind.RECV_BACKWARD:
                            there_back[stage * m + i] = end
                        elif kind is Kind.WEIGHT_GRAD:
                            added[stage] = end
                        elif kind is Kind.INPUT_GRAD:
                            back[stage * m + i] = end
                        elif kind is Kind.BACKWARD:
                            back[stage * m + i] = added[stage] = end
                for stage, end in added.items():
                    self._complete[stage, step] = max(end, self._complete.get((stage, step), 0.0))

    def waits(self, rank: int) -> list[Idle]:
        """A rank's waits, in order; what borders on each other with one cause is one."""
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
        row, starts, ends = self._program.ranks[rank], self._times.start[rank], self._times.end[rank]
        computations = [n for n, action in enumerate(row) if action.kind in COMPUTE or action.parts]
        first, last = (computations[0], computations[-1]) if computations else (-1, -1)
        free, reductions = 0.0, list[tuple[Action, float]]()
        gathered: dict[int, float] = {}  # by stage: when its parameters were there
        for step, before in enumerate([0.0, *self._end_of_step[:-1]]):
            begin = step * len(row)
            here = slice(begin, begin + len(row))
            for n, (action, start, end) in enumerate(zip(row, starts[here], ends[here], strict=True)):
                kind = action.kind
                if kind is Kind.STEP:
                    otherwise = Cause.DRAIN if n > last else Cause.DEPENDENCY
                    yield from _cut(free, start, *self._reduced(reductions, free, step), otherwise)
                    reductions = []
                elif kind in _OF_COMPUTE:
                    if start > free:
                        if n == first:
                            border = min(max(before, free), start)
                            yield Idle(Cause.DRAIN, free, border)
                            yield Idle(Cause.WARM_UP, border, start)
                        else:
                            yield from _cut(free, start, *self._inputs(action, step, free, gathered), Cause.DEPENDENCY)
                else:
                    if kind is Kind.GATHER:
                        gathered[action.stage] = end
                    elif kind is Kind.REDUCE:
                        reductions.append((action, end))
                    continue
                free = end
        yield Idle(Cause.DRAIN, free, max(self._end_of_step))

    def _inputs(self, action: Action, step: int, free: float, gathered: dict[int, float]) -> tuple[float, float]:
        """When the last input of a computation had been computed, and when all had arrived, parameters included."""
        computed = arrived = free
        for part in action.computes():
            n = part.stage * self._m + part.microbatch
            if part.kind is not Kind.WEIGHT_GRAD:
                arrived = max(arrived, gathered.get(part.stage, 0.0))
            if part.kind in _LOCAL:
                continue
            if part.kind is not Kind.FORWARD:
                arrived = max(arrived, self._arrived_back[step][n])
                if part.stage + 1 < self._program.num_stages:
                    computed = max(computed, self._computed_back[step][n + self._m])
            else:
                arrived = max(arrived, self._arrived_ahead[step][n])
                if part.stage > 0:
                    computed = max(computed, self._computed_ahead[step][n - self._m])
        return computed, arrived

    def _reduced(self, reductions: list[tuple[Action, float]], free: float, step: int) -> tuple[float, float]:
        """The same for an optimizer step, which waits for reductions."""
        whole = [self._complete[action.stage, step] for action, _ in reductions if action.microbatch < 0]
        return max([free, *whole]), max([free, *(end for _, end in reductions)])


def _cut(start: float, end: float, computed: float, arrived: float, otherwise: Cause) -> Iterator[Idle]:
    computed = min(computed, end)
    arrived = min(max(computed, arrived), end)
    yield Idle(otherwise, start, computed)
    yield Idle(Cause.COMMUNICATION, computed, arrived)
    yield Idle(otherwise, arrived, end)


def _kept(program: Program, rank: int, times: Times, num_steps: int) -> dict[Buffer, Kept]:
    """The lives of a rank's buffers in the times of its actions, one step after the other."""
    starts, ends = np.array(times.start[rank]), np.array(times.end[rank])
    firsts = len(program.ranks[rank]) * np.arange(num_steps)
    found: dict[Buffer, list[Life]] = {buffer: [] for buffer in Buffer}
    for life in lives(program, rank):
        found[life.buffer].append(life)
    return {buffer: _curve(mine, program.sizes, starts, ends, firsts) for buffer, mine in found.items()}


def _curve(mine: list[Life], sizes: Sizes | None, starts: Array, ends: Array, firsts: Array) -> Kept:
    """Number and bytes of buffers of one kind over time; `firsts` are the first actions of steps."""
    of_lives = [num_bytes(life, sizes) for life in mine]
    is_message = bool(mine) and mine[0].buffer is Buffer.MESSAGE
    # By life and step, in arrays of (lives, steps).
    born = np.array([life.born for life in mine], int)[:, None] + firsts
    dies = np.array([life.dies for life in mine], int)[:, None] + firsts
    taken = np.array([life.taken for life in mine], bool)[:, None]
    end = np.where(taken, starts[dies], ends[dies])
    if is_message:  # it is there when it has arrived; its receive begins when it has left
        begin, began, ended = ends[born], np.ones_like(born), np.zeros_like(born)
        is_there = begin < end
    else:  # changes at one time are in the order of the program
        begin, began, ended = starts[born], 2 * born, 2 * dies + ~taken
        is_there = np.ones_like(born, bool)
    moments, orders = np.stack([begin, end], -1)[is_there].ravel(), np.stack([began, ended], -1)[is_there].ravel()
    changes = np.tile([1, -1], int(is_there.sum()))
    order = np.lexsort((orders, moments))
    counts = np.cumsum(changes[order])
    if not len(changes):
        return Kept(moments, counts, counts)
    if None in of_lives:
        return Kept(moments[order], counts, None)
    # Whole numbers of any size, where all together may be more than 64 bits.
    largest = max((size for size in of_lives if size is not None), default=0)
    column = np.array(of_lives, object if largest * (1 + len(changes)) >= 2**63 else np.int64)
    of_changes = np.repeat(np.broadcast_to(column[:, None], is_there.shape)[is_there], 2) * changes
    return Kept(moments[order], counts, np.cumsum(of_changes[order]))
