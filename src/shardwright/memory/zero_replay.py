"""The buffers and collectives of the ZeRO engine in a step: its events (sharding/zero_events.py), replayed on sizes.

The program determines when a stage is gathered, computed with, reduced and updated, and the events follow as in a run.
So the collectives equal those of the ledger, and the peak of the pool equals that of the run. Only one thing is
unknown: if two passes run at the same time (DualPipe), either may borrow first. They are replayed one after the other.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from shardwright.config.job import JobSpec
from shardwright.memory.rank_course import CourseEvent, HasEvents, MessagesAt, RankCourse, rank_course
from shardwright.memory.rank_state import StageState, UnitKey
from shardwright.memory.sized_unit import MovedCounts, SizedUnit
from shardwright.schedule.action import Kind
from shardwright.schedule.schedule import Program
from shardwright.sharding.buffer_pool import Loan
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.unit_update import COLLECTIVES, UpdateGroup
from shardwright.sharding.zero_events import Reductions, StageEvents


@dataclass(frozen=True)
class Replayed:
    """The memory and traffic of one run of a program on a rank, in bytes.

    `calls` and `moved_bytes` count each (collective, mesh axis), with bytes of the full tensor, as the ledger does.
    `num_casts` counts, by (stage, region, is of experts), the passes with other values than the pass before: weights
    are then cast to fp8 anew. `pool_bytes` is the peak of the buffer pool; `buffers_bytes` is the peak of the pool,
    pipeline messages, and what a reduce-scatter needs besides its operands, together.
    """

    calls: dict[tuple[str, str], int]
    moved_bytes: dict[tuple[str, str], int]
    num_casts: dict[tuple[int, str, bool], int]
    pool_bytes: int
    buffers_bytes: int


class _SizedReductions(Reductions):
    @property
    def situation(self) -> tuple[object, ...]:
        """The units whose reductions are under way."""
        return tuple(self._under_way)


class _SizedStage(StageEvents[SizedUnit]):
    """A stage whose forwards and backwards consist only of events."""

    def __init__(
        self, state: StageState, units: dict[UnitKey, SizedUnit], reductions: Reductions, counts: MovedCounts
    ) -> None:
        own_units = {number: units[state.stage, number] for number in range(len(state.units))}
        super().__init__(
            list(own_units.values()),
            late={own_units[number] for number, unit in enumerate(state.units) if unit.is_late},
            units_in={region: [units[key] for key in keys] for region, keys in state.units_in.items()},
            is_shared=any(unit.replicas.num_ranks > 1 or unit.replicas.num_copies > 1 for unit in state.units),
            reductions=reductions,
            groups=[(group.units, group.scratch_bytes) for group in state.updates],
        )
        self._moved_by_update = [_moved_by_update(state, group) for group in state.updates]
        self._counts = counts
        # Passes over thousands of microbatches need the same lists: they are made once.
        self._gathered = [region for region in state.regions if self.is_gathered(region)]
        self._borrows_gradients = any(unit.replicas.zero >= 2 for unit in state.units)
        # Experts may keep their values while the other values of a layer are gathered for each pass.
        self._cast_together = {
            (region, is_expert): [units[key] for key in dict.fromkeys(state.unit_of[place.name] for place in places)]
            for region, of_region in state.regions.items()
            for is_expert in (False, True)
            if region.isdigit() and (places := [place for place in of_region if place.is_expert == is_expert])
        }
        self._cast: dict[tuple[str, bool], int] = {}
        self._further = set(state.further)
        self._arrivals = {
            kind: {
                region: [
                    (unit, len(list(of_unit)))
                    for unit, of_unit in groupby(
                        units[state.unit_of[place.name]] for place in _gradients_of(places, kind)
                    )
                ]
                for region, places in state.regions.items()
            }
            for kind in (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        }
        self._added_before = {
            kind: {
                region: [units[state.unit_of[name]] for name in names if kind is not Kind.WEIGHT_GRAD]
                for region, names in state.added_before.items()
            }
            for kind in self._arrivals
        }

    def _make_steps(self, number: int, scratch: Loan[None]) -> None:
        self._counts.note()
        for axis, num_bytes in self._moved_by_update[number]:
            self._counts.move(COLLECTIVES[self._counts.job.optimizer.facts.matrix_update], axis, num_bytes)

    def casts(self, keeps_graph: bool) -> Iterator[tuple[str, bool]]:
        """Yield the layers, as (region, is of experts), whose values differ from those of the pass before, when a pass
        begins. Further tokens are only in passes that keep a graph (`keeps_graph`)."""
        for weights, units in self._cast_together.items():
            if weights[0] in self._further and not keeps_graph:
                continue
            version = sum(unit.version for unit in units)
            if self._cast.get(weights) != version:
                self._cast[weights] = version
                yield weights

    @property
    def situation(self) -> tuple[object, ...]:
        """All that its next events depend on, with those of its units; of the next casts, the ages of the values."""
        ages = [
            None if (cast := self._cast.get(weights)) is None else sum(unit.version for unit in units) - cast
            for weights, units in self._cast_together.items()
        ]
        units = (unit.situation for unit in self.units)
        return self.is_armed, self._next, tuple(self._due), *units, *ages

    def show_versions(self) -> None:
        """Note that the next pass gets its own version of the values, so that all are cast anew."""
        self._cast.clear()

    def forward(self, trains: bool) -> None:
        """Replay the forward of a microbatch through all regions."""
        for region in self._gathered:
            self.begin_forward(region)
            self.end_forward(region, trains and region != "embedding")

    def backward(self, kind: Kind) -> None:
        """Replay a backward of a microbatch, or a part of it, through all regions."""
        if not (self._gathered or self._borrows_gradients or self.is_armed):
            return
        for region, arrivals in reversed(self._arrivals[kind].items()):
            needs_values = region in self._gathered and region != "embedding" and kind is not Kind.WEIGHT_GRAD
            if needs_values:
                self.begin_backward(region)
            for unit in self._added_before[kind].get(region, ()):
                unit.open()
            for unit, number in arrivals:
                unit.open()
                self.gradient_arrived(unit, number)
            if needs_values:
                self.end_backward(region)


def _moved_by_update(state: StageState, group: UpdateGroup) -> list[tuple[str, int]]:
    """The collectives of an update, as (axis, bytes)."""
    replicas = state.units[group.units[0]].replicas
    sent_bytes = group.update.sent_bytes(replicas.index, replicas.tp_index) if group.update is not None else ()
    return [(replicas.shards_axis if along == "shards" else along, num_bytes) for along, num_bytes in sent_bytes]


class _Replay:
    """The stages of a rank, in their order, on a course."""

    def __init__(
        self, job: JobSpec, program: Program, pp_rank: int, states: dict[int, StageState], *, with_casts: bool
    ) -> None:
        self.counts = MovedCounts(job)
        self._casts, self._shows_versions = with_casts and _has_casts(job), program.weights != "current"
        self.course = course_of(program, pp_rank, states, with_casts=self._casts)
        units = {
            (number, n): SizedUnit(unit, self.counts)
            for number, stage in states.items()
            for n, unit in enumerate(stage.units)
        }
        self._reductions = _SizedReductions()
        self._numbers = list(states)
        self._stages = [_SizedStage(stage, units, self._reductions, self.counts) for stage in states.values()]

    def run(self, is_first: bool) -> None:
        """Replay the list of the rank once. After the first time, its messages begin as those of the replay before
        end."""
        course, later = self.course, int(not is_first)
        events = list(zip(course.events, course.messages[later], strict=True))
        for start, length, count in course.laps[later]:
            self._run_laps(events[start : start + length], count)
        self._note_with(course.most_at_end[later])

    def _run_laps(self, events: Sequence[tuple[CourseEvent, MessagesAt]], count: int) -> None:
        """Replay events `count` times. Laps after one that leaves all as it was would move the same as this one, and
        are only counted."""
        situation = self._situation() if count > 1 else None
        for num_left in reversed(range(count)):
            moved_before = [Counter(moved) for moved in self.counts.moved]
            for event, messages in events:
                self._note_with(messages.before)
                self._carry_out(event, messages.as_begins)
                self._note_with(messages.after)
            if not num_left:
                return
            before, situation = situation, self._situation()
            if situation == before:
                for moved, earlier in zip(self.counts.moved, moved_before, strict=True):
                    moved.update({key: num_left * (number - earlier[key]) for key, number in moved.items()})
                return

    def _situation(self) -> tuple[object, ...]:
        """All that the next events of the rank depend on."""
        return self.counts.situation, self._reductions.situation, *(stage.situation for stage in self._stages)

    def _note_with(self, num_messages: int) -> None:
        self.counts.num_messages = num_messages
        self.counts.note()

    def _carry_out(self, event: CourseEvent, as_begins: tuple[int, ...]) -> None:
        kind, place, armings, passes = event
        for armed, is_last, is_split in armings:
            self._stages[armed].arm(is_last, is_split)
        if kind is Kind.STEP:
            self._step(self._stages if place < 0 else [self._stages[place]])
        elif kind is Kind.REDUCE:
            self._stages[place].reduce()
        elif kind is Kind.GATHER:
            self._stages[place].gather()
        elif kind is Kind.RELEASE:
            self._stages[place].release()
        for one_pass, num_messages in zip(passes, as_begins, strict=True):
            self.counts.num_messages = num_messages
            self._compute(*one_pass)

    def _step(self, stages: list[_SizedStage]) -> None:
        for stage in stages:
            stage.wait()
        for stage in stages:
            stage.reduce_late()
        for stage in stages:
            stage.update(1.0, 0.0)
            stage.clear_gradients()

    def _compute(self, place: int, kind: Kind, keeps_graph: bool) -> None:
        stage, number = self._stages[place], self._numbers[place]
        if self._casts and kind is not Kind.WEIGHT_GRAD:
            if self._shows_versions:
                stage.show_versions()
            self.counts.num_casts.update((number, *weights) for weights in stage.casts(keeps_graph))
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            stage.forward(keeps_graph)
        else:
            stage.backward(kind)


def _has_casts(job: JobSpec) -> bool:
    """True if weights are cast to fp8."""
    return job.precision.float8 != "none"


def course_of(program: Program, pp_rank: int, states: dict[int, StageState], *, with_casts: bool = False) -> RankCourse:
    """The course of a rank that holds some stages: the events at which its memory may change and, `with_casts`, each
    pass, at which weights may be cast to fp8."""
    has_events = []
    for state in states.values():
        needed = (states[stage].units[n] for keys in state.units_in.values() for stage, n in keys)
        at_any_pass = with_casts or any(unit.replicas.zero == 3 for unit in needed)
        borrows_gradients = any(unit.replicas.zero >= 2 for unit in state.units)
        has_events.append(HasEvents(at_any_pass, at_any_pass or borrows_gradients))
    return rank_course(program, pp_rank, has_events)


def replay(
    job: JobSpec, program: Program, pp_rank: int, stages: dict[int, StageState], with_casts: bool = True
) -> Replayed:
    """Replay the list of one pipeline rank, which holds `stages`, step after step until the pool grows no more.

    A step begins with the buffers that the step before left, which may fit worse than fresh ones. Casts to fp8 borrow
    nothing, so that the memory is known without them (`with_casts`), and most passes have no other events.
    """
    step_replay = _Replay(job, program, pp_rank, stages, with_casts=with_casts)
    counts, before = step_replay.counts, -1
    while before < counts.pool.peak_bytes:
        is_first, before = before < 0, counts.pool.peak_bytes
        counts.calls.clear()
        counts.moved_bytes.clear()
        counts.num_casts.clear()
        step_replay.run(is_first)
    return Replayed(
        dict(counts.calls), dict(counts.moved_bytes), dict(counts.num_casts), counts.pool.peak_bytes, counts.peak_bytes
    )


def _gradients_of(places: tuple[ParameterShard, ...], kind: Kind) -> Iterator[ParameterShard]:
    """The parameters of a region whose gradients a backward adds to, in the order in which the gradients arrive.

    It is the reverse order of use. Places are listed in the order of use, except a bias, which is listed before its
    matrix. A norm adds both its gradients together.
    """
    order = list(places)
    for i, (place, following) in enumerate(pairwise(places)):
        if place.name.endswith("_bias") or following.name == place.name.removesuffix("norm.weight") + "norm.bias":
            order[i : i + 2] = following, place
    for place in reversed(order):
        if not place.is_frozen and (kind is Kind.BACKWARD or place.is_put_off == (kind is Kind.WEIGHT_GRAD)):
            yield place
