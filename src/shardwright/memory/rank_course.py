"""The part of a pipeline rank's list that a replay of ZeRO's events reads: the actions at which a unit may communicate,
borrow or be cast, and the messages in memory meanwhile.

These are often a few of thousands of actions. They depend on the program alone, so that all plans with one program
share them; and without the numbers of stages and microbatches, the ranks in the middle of a pipeline have equal ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from shardwright.config.kept_results import kept_by_identity
from shardwright.memory.held_messages import HeldMessages, held_messages
from shardwright.memory.repeated_items import Laps, laps_of
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.lowering.reductions import Arming, before_reductions
from shardwright.schedule.schedule import Order, Program

_OF_UNITS = frozenset({Kind.STEP, Kind.REDUCE, Kind.GATHER, Kind.RELEASE})
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
_FEWEST_CUT = 100  # events: a shorter list is replayed faster than it is cut into laps


class HasEvents(NamedTuple):
    """Kinds of passes at which the units of a stage gather, borrow or are cast, even if nothing is reduced after
    them."""

    forward: bool
    backward: bool


class CourseEvent(NamedTuple):
    """An action of a rank's list. Stages are told by their place among those of the rank, -1 for none: `armings` are
    (stage, is last, is split), and `passes` (stage, kind, keeps a graph)."""

    kind: Kind
    stage: int
    armings: tuple[tuple[int, bool, bool], ...]
    passes: tuple[tuple[int, Kind, bool], ...]


class MessagesAt(NamedTuple):
    """Numbers of messages in memory: the most since the event before, when each pass of the event begins, and after
    it."""

    before: int
    as_begins: tuple[int, ...]
    after: int


@dataclass(frozen=True, eq=False)
class RankCourse:
    """The events of a rank's list, the messages at each in the first replay of the list and in each further one, and
    the most messages after the last event in both. Equal courses of a program are one object."""

    events: tuple[CourseEvent, ...]
    messages: tuple[tuple[MessagesAt, ...], tuple[MessagesAt, ...]]
    most_at_end: tuple[int, int]

    @cached_property
    def laps(self) -> tuple[list[Laps], list[Laps]]:
        """The events as laps that have the same messages, in the first replay and in each further one. A short list is
        one lap."""
        if len(self.events) < _FEWEST_CUT:
            whole = [Laps(0, len(self.events), 1)]
            return whole, whole
        first, later = (laps_of(list(zip(self.events, at, strict=True))) for at in self.messages)
        return first, later


def rank_course(program: Program, pp_rank: int, has_events: Sequence[HasEvents]) -> RankCourse:
    """The course of a pipeline rank; `has_events` is of each stage of the rank."""
    courses, key = _courses(program.ranks), (pp_rank, *has_events)
    if key not in courses.of_rank:
        facts = _facts(program, pp_rank, has_events)
        courses.of_rank[key] = courses.by_facts.setdefault(facts, RankCourse(*facts))
    return courses.of_rank[key]


_Facts = tuple[tuple[CourseEvent, ...], tuple[tuple[MessagesAt, ...], tuple[MessagesAt, ...]], tuple[int, int]]


class _Courses(NamedTuple):
    """The courses of a program that were asked for so far."""

    of_rank: dict[tuple[object, ...], RankCourse]
    by_facts: dict[_Facts, RankCourse]


@partial(kept_by_identity, most=8)
def _courses(ranks: Order) -> _Courses:
    return _Courses({}, {})


def _facts(program: Program, pp_rank: int, has_events: Sequence[HasEvents]) -> _Facts:
    row = program.ranks[pp_rank]
    places = {stage: place for place, stage in enumerate(program.placement.stages_of(pp_rank))}
    armings = before_reductions(row)
    indices = list(_with_events(row, armings, dict(zip(places, has_events, strict=True))))
    events = tuple(_event(program, row[index], armings.get(index, ()), places) for index in indices)
    first = held_messages(program, row)
    later = held_messages(program, row, first.left) if first.left else first
    if later.first_send < len(row):
        later = later.once_sent()
    first_at, first_end = _messages(first, indices, 0)
    later_at, later_end = _messages(later, indices, first_end)
    return events, (first_at, later_at), (first_end, later_end)


def _event(program: Program, action: Action, armings: Sequence[Arming], places: Mapping[int, int]) -> CourseEvent:
    passes = []
    for part in action.computes():
        is_run_again = part.kind is Kind.FORWARD and (part.stage, part.microbatch) in program.recomputed
        passes.append((places[part.stage], part.kind, program.trains and not is_run_again))
    armed = ((places[arming.stage], arming.is_last, arming.is_split) for arming in armings)
    return CourseEvent(action.kind, places.get(action.stage, -1), tuple(armed), tuple(passes))


def _with_events(
    row: Sequence[Action], armings: Mapping[int, Sequence[Arming]], has_events: Mapping[int, HasEvents]
) -> Iterator[int]:
    """The indices of actions with events. The others only take and leave messages."""
    armed = set[int]()
    at_any_time = {
        (kind, stage)
        for stage, at in has_events.items()
        for kind in COMPUTE
        if (at.backward if kind in _BACKWARDS else at.forward)
    }
    for index, action in enumerate(row):
        if index in armings:
            armed.update(arming.stage for arming in armings[index])
        kind, stage = action[:2]
        if kind in _OF_UNITS:
            yield index
            if kind is Kind.REDUCE:
                armed.discard(stage)
        elif kind in COMPUTE:
            if stage in armed or (kind, stage) in at_any_time:
                yield index
        elif any(part.stage in armed or part[:2] in at_any_time for part in action.parts):
            yield index


def _messages(held: HeldMessages, indices: Sequence[int], at_start: int) -> tuple[tuple[MessagesAt, ...], int]:
    """The messages at some actions, and the most after the last of them. There are `at_start` before the list."""
    at, start, number = list[MessagesAt](), 0, at_start
    for index in indices:
        before = max(held.after[start:index], default=number)
        at.append(MessagesAt(before, held.as_begins.get(index, ()), number := held.after[index]))
        start = index + 1
    return tuple(at), max(held.after[start:], default=number)
