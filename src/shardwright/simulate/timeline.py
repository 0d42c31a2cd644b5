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
from shardwright.schedule.lives import Buffer, lives, num_bytes
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Times


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


@dataclass(frozen=True, slots=True)
class Kept:
    """All buffers of one kind on a rank: their number and their bytes over time; None where those are not known."""

    count: Curve
    num_bytes: Curve | None

    @property
    def most(self) -> int:
        """Most at once."""
        return max((count for _, count in self.count), default=0)

    @property
    def most_bytes(self) -> int | None:
        """Most bytes at once."""
        return None if self.num_bytes is None else max((size for _, size in self.num_bytes), default=0)


@dataclass(frozen=True)
class RankTimeline:
    """One rank's part. `kept` is what it holds in memory, by kind of buffer."""

    spans: tuple[Span, ...]
    idle: tuple[Idle, ...]
    kept: dict[Buffer, Kept]

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
        RankTimeline(tuple(row), tuple(context.waits(rank)), _kept(program, rank, row)) for rank, row in enumerate(rows)
    ]
    return Timeline(program, num_steps, times.makespan, tuple(ranks))


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
                    if part.kind not in _LOCAL:
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
        gathered: dict[int, float] = {}  # by stage: when its parameters were there
        for n, span in enumerate(row):
            if span.action.kind is Kind.GATHER:
                gathered[span.action.stage] = span.end
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
                yield from _cut(free, span.start, *self._inputs(span, free, gathered), Cause.DEPENDENCY)
            free = span.end
        yield Idle(Cause.DRAIN, free, max(self._end_of_step))

    def _inputs(self, span: Span, free: float, gathered: dict[int, float]) -> tuple[float, float]:
        """When the last input of a computation had been computed, and when all had arrived, parameters included."""
        computed = arrived = free
        for part in span.action.computes():
            i, step = part.microbatch, span.step
            if part.kind is not Kind.WEIGHT_GRAD:
                arrived = max(arrived, gathered.get(part.stage, 0.0))
            if part.kind in _LOCAL:
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


def _kept(program: Program, rank: int, row: list[Span]) -> dict[Buffer, Kept]:
    """The lives of a rank's buffers in the times of its actions, one step after the other."""
    length = len(program.ranks[rank])
    changes: dict[Buffer, list[tuple[float, int, int, int | None]]] = {buffer: [] for buffer in Buffer}
    for life in lives(program, rank):
        size = num_bytes(life, program.sizes)
        for first in range(0, len(row), length):
            born, dies = row[first + life.born], row[first + life.dies]
            end = dies.start if life.taken else dies.end
            less = None if size is None else -size
            if life.buffer is not Buffer.MESSAGE:  # changes at one time are in the order of the program
                began, ended = 2 * (first + life.born), 2 * (first + life.dies) + (not life.taken)
                changes[life.buffer] += [(born.start, began, 1, size), (end, ended, -1, less)]
            elif born.end < end:  # it is there when it has arrived; its receive begins when it has left
                changes[life.buffer] += [(born.end, 1, 1, size), (end, 0, -1, less)]
    return {buffer: _curves(found) for buffer, found in changes.items()}


def _curves(changes: list[tuple[float, int, int, int | None]]) -> Kept:
    """Sums of (time, order at that time, change, change in bytes)."""
    changes = sorted(changes, key=lambda change: change[:2])
    counts, sizes = list[tuple[float, int]](), list[tuple[float, int]]()
    count = num_bytes = 0
    for time, _, more, more_bytes in changes:
        count += more
        num_bytes += more_bytes or 0
        counts.append((time, count))
        sizes.append((time, num_bytes))
    known = all(more_bytes is not None for *_, more_bytes in changes)
    return Kept(tuple(counts), tuple(sizes) if known else None)
