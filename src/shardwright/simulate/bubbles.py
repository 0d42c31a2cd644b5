"""The idle time of ranks under a schedule, their memory and their messages: the columns of a table of schedules.

"Zero bubble" can mean three things, so a schedule is measured in three ways. One step alone: from the first action to
the last, minus the work; this is the cost if all ranks meet at the optimizer step. One rank's own span: from its first
action to its last. And a step among others, without a barrier between them: the time by which each further step ends
later than the previous one, minus the work. ZB-H2 idles (p - 1)F by the first measure, and not at all by the others.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter

from shardwright.schedule.action import COMPUTE, SEND, Action, Kind
from shardwright.schedule.buffer_lifetimes import peak_activations
from shardwright.schedule.lowering.weight_versions import stashed_versions
from shardwright.schedule.schedule import Program, Schedule
from shardwright.schedule.timing import Costs, Times, play_on

_PAIR = (Kind.OVERLAP, -1)
STEADY_STEPS = 3  # steps after which each further step takes equally long


@dataclass(frozen=True)
class Work:
    """The work of one microbatch on one rank, in all its layers; so the same for any number of stages.

    `latency` is the time from the end of a message's sending to its arrival; `pair` is the time of an overlapped pair,
    as a share of the sum of its parts. `gather` is the time to gather all parameters of a rank, if they are sharded,
    and to reduce their gradients.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    latency: float = 0.0
    pair: float = 1.0
    gather: float = 0.0

    def costs(self, program: Program) -> Costs:
        """The costs of a program, by stage."""
        return self.by_stage(program.num_stages, program.num_ranks)

    def by_stage(self, num_stages: int, num_ranks: int) -> Costs:
        """The costs by stage: a chunk is one v-th of a rank's layers."""
        v = num_stages / num_ranks
        forward, input_grad, weight_grad = self.forward / v, self.input_grad / v, self.weight_grad / v
        equal = Costs.uniform(num_stages, forward, input_grad, weight_grad, self.latency)
        collective = (self.gather / v,) * num_stages if self.gather else ()
        return replace(equal, pair=self.pair, gather=collective, reduce=collective)


@dataclass(frozen=True)
class Moved:
    """Bytes of a step, over all ranks of one pipeline: of messages, of gradients and of parameters."""

    messages: int
    reductions: int
    gathers: int

    @classmethod
    def of(cls, program: Program) -> "Moved | None":
        """The bytes that a program moves; None if its sizes are unknown."""
        if program.sizes is None:
            return None

        def total(kinds: frozenset[Kind]) -> int:
            return sum(program.num_bytes(a) or 0 for row in program.ranks for a in row if a.kind in kinds)

        return cls(total(SEND), total(frozenset({Kind.REDUCE})), total(frozenset({Kind.GATHER})))


@dataclass(frozen=True)
class Bubbles:
    """A row of the table. Times are in the units of the costs; tuples are by rank.

    `bubble` is one step's makespan minus a rank's busy time: the mean over ranks. Ranks are equally busy if stages are
    equal; only if overlapped pairs save time, the ranks of DualPipe that run more pairs are less busy. `span_bubble` is
    the largest idle time of a rank between its own first and last compute action. `period_bubble` is the mean idle time
    of a rank in a step that others precede and follow without a barrier. `peak_activations` are microbatches of all
    layers of a rank, and `parameter_copies` is the part of the model that a rank holds, with older versions of weights,
    in units of one p-th. `messages` are the sends of one step, `reductions` and `gathers` its collectives on stages,
    and `moved` the bytes of all three.
    """

    makespan: float
    bubble: float
    span_bubble: float
    period_bubble: float
    peak_activations: tuple[float, ...]
    parameter_copies: tuple[float, ...]
    messages: int
    reductions: int = 0
    gathers: int = 0
    moved: Moved | None = None

    @property
    def bubble_fraction(self) -> float:
        """Share of one step for which a rank idles; 0 for a step that takes no time."""
        return self.bubble / self.makespan if self.makespan else 0.0


def measure_and_play(
    program: Program, costs: Costs, num_steps: int, stream: Callable[[int], Schedule] | None = None
) -> tuple[Bubbles, Times]:
    """The bubbles of any program of one step, also of one written by hand, and the times of some steps of it.

    Further steps are the program again, or `stream(1)`, which may be the same without messages. For an asynchronous
    program they are `stream(number of steps)`, because such a program has no flush between steps.
    """
    memory_schedule: Schedule = program
    if program.weights == "current" or stream is None:
        later = None if stream is None else stream(1)
        times, ends = play_on(program, costs, num_steps, max(num_steps, STEADY_STEPS + 1), later=later)
        period = ends[STEADY_STEPS] - ends[STEADY_STEPS - 1]
    else:
        memory_schedule = stream(STEADY_STEPS)
        times, ends = play_on(program, costs, num_steps, num_steps)
        (longer,), (shorter,) = (
            play_on(schedule, costs, 0, 1)[1] for schedule in (stream(STEADY_STEPS + 1), memory_schedule)
        )
        period = longer - shorter
    return _bubbles(program, costs, times, ends[0], period=period, memory_schedule=memory_schedule), times


def _bubbles(
    program: Program, costs: Costs, times: Times, makespan: float, period: float, memory_schedule: Schedule
) -> Bubbles:
    """The bubbles from the played times: the first step, of `makespan`, and a step among others, of `period`."""
    busy = _busy(program, costs)
    num_of = Counter(map(itemgetter(0), chain.from_iterable(program.ranks)))  # by kind
    mean_busy = sum(busy) / len(busy)
    share = program.num_stages / program.num_ranks  # stages of a rank that holds its part of the model once
    copies = [len(program.placement.stages_of(rank)) / share for rank in range(program.num_ranks)]
    return Bubbles(
        makespan=makespan,
        bubble=makespan - mean_busy,
        span_bubble=max(span - work for span, work in zip(_spans(program, times), busy, strict=True)),
        period_bubble=period - mean_busy,
        peak_activations=tuple(peak / share for peak in peak_activations(memory_schedule)),
        parameter_copies=tuple(
            n * versions for n, versions in zip(copies, stashed_versions(memory_schedule), strict=True)
        ),
        messages=sum(num_of[kind] for kind in SEND),
        reductions=num_of[Kind.REDUCE],
        gathers=num_of[Kind.GATHER],
        moved=Moved.of(program),
    )


def _busy(program: Program, costs: Costs) -> list[float]:
    """Time in computation, by rank: actions of one kind and stage take equally long."""
    busy = []
    for row in program.ranks:
        num_of = Counter(map(itemgetter(0, 1), row))
        unpaired_s = sum(n * costs.compute(Action(*fields)) for fields, n in num_of.items() if fields[0] in COMPUTE)
        num_paired = Counter(part[:2] for action in row for part in action.parts) if _PAIR in num_of else Counter()
        paired_s = sum(n * costs.compute(Action(*fields)) for fields, n in num_paired.items())
        busy.append(unpaired_s + costs.pair * paired_s)
    return busy


def _spans(program: Program, times: Times) -> list[float]:
    """Time from the start of each rank's first compute action of a step to the end of its last."""
    spans = []
    for row, start, end in zip(program.ranks, times.start, times.end, strict=True):
        first_index = next((index for index, action in enumerate(row) if action.computes()), None)
        last_index = next((index for index in reversed(range(len(row))) if row[index].computes()), None)
        spans.append(0.0 if first_index is None or last_index is None else end[last_index] - start[first_index])
    return spans
