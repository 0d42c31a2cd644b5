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

from shardwright.schedule.action import RECV, Action, Kind
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Times


class Resource(StrEnum):
    """What an action occupies: resources of one rank work side by side. An arrival occupies nothing."""

    COMPUTE = "compute"
    FORWARD_LINK = "forward link"
    BACKWARD_LINK = "backward link"
    COLLECTIVES = "collectives"
    ARRIVAL = "arrival"


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


@dataclass(frozen=True)
class RankTimeline:
    """One rank's part.

    `alive` counts (stage, microbatch) pairs whose activations are kept; `buffered` messages that have arrived and
    that no computation has taken yet.
    """

    spans: tuple[Span, ...]
    idle: tuple[Idle, ...]
    alive: Curve
    buffered: Curve

    @property
    def busy(self) -> float:
        """Time in computation, the optimizer's included."""
        return sum(span.end - span.start for span in self.spans if span.resource is Resource.COMPUTE)

    def idle_by_cause(self) -> dict[Cause, float]:
        """Time of every cause; with `busy` they add up to the makespan."""
        return {cause: sum(gap.end - gap.start for gap in self.idle if gap.cause is cause) for cause in Cause}


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
    rows = []
    for row, starts, ends in zip(times.rows, times.start, times.end, strict=True):
        length = len(row) // num_steps
        timed = zip(row, starts, ends, strict=True)
        rows.append([Span(a, t0, t1, _resource(a), n // length) for n, (a, t0, t1) in enumerate(timed)])
    context = _Context(program, rows, num_steps)
    ranks = [
        RankTimeline(tuple(row), tuple(context.waits(rank)), tuple(_alive(program, row)), tuple(_buffered(row)))
        for rank, row in enumerate(rows)
    ]
    return Timeline(program, num_steps, times.makespan, tuple(ranks))


def _resource(action: Action) -> Resource:
    if action.kind is Kind.SEND_FORWARD:
        return Resource.FORWARD_LINK
    if action.kind is Kind.SEND_BACKWARD:
        return Resource.BACKWARD_LINK
    if action.kind in RECV:
        return Resource.ARRIVAL
    return Resource.COLLECTIVES if action.kind in (Kind.REDUCE, Kind.GATHER) else Resource.COMPUTE


class _Context:
    """All spans, and what is looked up in them to explain a wait."""

    def __init__(self, program: Program, rows: list[list[Span]], num_steps: int) -> None:
        self._program = program
        self._rows = rows
        self._end_of_step = [max(s.end for row in rows for s in row if s.step == n) for n in range(num_steps)]
        self._computed: dict[tuple[bool, int, int, int], float] = {}  # (backward?, stage, microbatch, step): when
        self._arrived: dict[tuple[bool, int, int, int], float] = {}  # the same, of the stage that receives
        self._complete: dict[tuple[int, int], float] = {}  # (stage, step): when the gradients of all copies are
        for row in rows:
            for span in row:
                action = span.action
                if action.kind in RECV:
                    backward = action.kind is Kind.RECV_BACKWARD
                    self._arrived[backward, action.stage, action.microbatch, span.step] = span.end
                for part in action.computes():
                    if part.kind is not Kind.WEIGHT_GRAD:
                        backward = part.kind is not Kind.FORWARD
                        self._computed[backward, part.stage, part.microbatch, span.step] = span.end
                    if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                        key = part.stage, span.step
                        self._complete[key] = max(span.end, self._complete.get(key, 0.0))

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
        row = self._rows[rank]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for n, span in enumerate(row):
            if span.action.computes():
                first.setdefault(span.step, n)
                last[span.step] = n
        free, reductions = 0.0, list[Span]()
        for n, span in enumerate(row):
            if span.action.kind is Kind.REDUCE:
                reductions.append(span)
            if span.resource is not Resource.COMPUTE:
                continue
            before = self._end_of_step[span.step - 1] if span.step else 0.0
            if span.action.kind is Kind.STEP:
                otherwise = Cause.DRAIN if n > last[span.step] else Cause.DEPENDENCY
                yield from _cut(free, span.start, *self._reduced(reductions, free), otherwise)
                reductions = []
            elif n == first[span.step]:
                border = min(max(before, free), span.start)
                yield Idle(Cause.DRAIN, free, border)
                yield Idle(Cause.WARM_UP, border, span.start)
            else:
                yield from _cut(free, span.start, *self._message(span, free), Cause.DEPENDENCY)
            free = span.end
        yield Idle(Cause.DRAIN, free, max(self._end_of_step))

    def _message(self, span: Span, free: float) -> tuple[float, float]:
        """When the last input of a computation had been computed, and when the last one had arrived."""
        computed = arrived = free
        for part in span.action.computes():
            i, step = part.microbatch, span.step
            if part.kind is Kind.WEIGHT_GRAD:
                continue
            backward = part.kind is not Kind.FORWARD
            producer = part.stage + (1 if backward else -1)
            computed = max(computed, self._computed.get((backward, producer, i, step), 0.0))
            arrived = max(arrived, self._arrived.get((backward, part.stage, i, step), 0.0))
        return computed, arrived

    def _reduced(self, reductions: list[Span], free: float) -> tuple[float, float]:
        """The same for an optimizer step, which waits for reductions."""
        whole = [self._complete[r.action.stage, r.step] for r in reductions if r.action.microbatch < 0]
        return max([free, *whole]), max([free, *(r.end for r in reductions)])


def _cut(start: float, end: float, computed: float, arrived: float, otherwise: Cause) -> Iterator[Idle]:
    computed = min(computed, end)
    arrived = min(max(computed, arrived), end)
    yield Idle(otherwise, start, computed)
    yield Idle(Cause.COMMUNICATION, computed, arrived)
    yield Idle(otherwise, arrived, end)


def _alive(program: Program, row: list[Span]) -> Iterator[tuple[float, int]]:
    """Activations live from the start of F to the end of B, or of W where the backward is split."""
    count = 0
    if not program.trains:
        return
    for span in row:
        parts = span.action.computes()
        begins = sum(part.kind is Kind.FORWARD for part in parts)
        ends = sum(part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD) for part in parts)
        if begins:
            count += begins
            yield span.start, count
        if ends:
            count -= ends
            yield span.end, count


def _buffered(row: list[Span]) -> Iterator[tuple[float, int]]:
    """A message lies in a buffer from its arrival to the start of the computation that takes it."""
    arrived: dict[tuple[bool, int, int, int], float] = {}
    changes: list[tuple[float, int]] = []
    for span in row:
        if span.action.kind in RECV:
            backward = span.action.kind is Kind.RECV_BACKWARD
            arrived[backward, span.action.stage, span.action.microbatch, span.step] = span.end
        for part in span.action.computes():
            key = part.kind is not Kind.FORWARD, part.stage, part.microbatch, span.step
            since = arrived.pop(key, span.start) if part.kind is not Kind.WEIGHT_GRAD else span.start
            if since < span.start:
                changes += [(since, 1), (span.start, -1)]
    count = 0
    for time, change in sorted(changes):
        count += change
        yield time, count
