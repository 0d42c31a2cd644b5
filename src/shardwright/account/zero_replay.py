"""What the ZeRO engine borrows and moves in a step: its events (sharding/zero_events.py), played on sizes.

The program says when a stage is gathered, computed with, reduced and updated, and the events follow as in a run. So the
collectives are those of the ledger, and the peak of the pool is that of the run. One thing is not known beforehand:
where two passes run side by side (DualPipe), which of them borrows first. They are replayed one after the other.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from shardwright.account.rank_state import StageState, UnitKey, UnitState
from shardwright.config.job import JobSpec
from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, TRAVELS, Product
from shardwright.schedule.lowering.reductions import before_reductions
from shardwright.schedule.message_sizes import message_bytes
from shardwright.schedule.schedule import Program
from shardwright.sharding.buffer_pool import BufferPool, Loan
from shardwright.sharding.compression import reduced_bucket, scattered_bucket
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.unit_update import COLLECTIVES, UpdateGroup
from shardwright.sharding.zero_events import Reductions, StageEvents, UnitEvents, UnitSizes


@dataclass(frozen=True)
class Replayed:
    """What one run of a program needs on a rank, in bytes.

    `moved` counts (collective, mesh axis) by calls and by bytes of the full tensor, as the ledger does. `num_casts`
    says of the layers of a stage, by (stage, region, is of experts), how often a pass has other values than the one
    before: casts of weights to fp8 do not outlive the values. `pool_bytes` is the peak of the buffer pool;
    `buffers_bytes` that of the pool, what waits for or is in a pipeline message, and what a reduce-scatter needs
    besides its operands.
    """

    calls: dict[tuple[str, str], int]
    moved_bytes: dict[tuple[str, str], int]
    num_casts: dict[tuple[int, str, bool], int]
    pool_bytes: int
    buffers_bytes: int


class MovedCounts:
    """What was moved, and how much memory there was at most: borrowed, for collectives and for messages."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.pool = BufferPool[None](lambda num_bytes: None)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        self.num_casts: Counter[tuple[int, str, bool]] = Counter()
        self.peak_bytes = 0
        # Gloo's reduce-scatter is an exchange of shares, which need memory (parallel/comm/collectives.py).
        self.is_staged = job.runs_on_cpu
        self.staged_bytes = 0
        self.messages: set[tuple[Kind, int, int]] = set()
        self.has_sent = False
        self._message_bytes = message_bytes(job)

    def move(self, collective: str, axis: str, num_bytes: int) -> None:
        """One more collective."""
        self.calls[collective, axis] += 1
        self.moved_bytes[collective, axis] += num_bytes

    def note(self) -> None:
        """See whether there is more memory than ever."""
        messages = (len(self.messages) + self.has_sent) * self._message_bytes
        self.peak_bytes = max(self.peak_bytes, self.pool.held_bytes + self.staged_bytes + messages)


class SizedUnit(UnitEvents[None]):
    """A unit whose events count what they move, and note the memory that there is."""

    def __init__(self, state: UnitState, counts: MovedCounts) -> None:
        precision, layout = counts.job.precision, state.layout
        sizes = UnitSizes(
            zero=state.replicas.zero,
            size=layout.size,
            shard_size=layout.shard_size,
            compute_bytes=4 if state.is_exact else precision.compute_bytes,
            gradient_bytes=precision.gradient_bytes,
            reduce_bytes=precision.reduce_bytes,
            num_parameters=len(state.places),
            num_put_off=sum(place.is_put_off for place in state.places),
        )
        super().__init__(sizes, counts.pool)
        self._state, self._counts = state, counts
        self._staged_bytes = 0
        self.version = 0  # of the values that are here

    def _start_gather(self, values: Loan[None] | None) -> None:
        replicas = self._state.replicas
        if replicas.num_ranks > 1:
            self._counts.move("all_gather", replicas.shards_axis, self.sizes.size * self.sizes.compute_bytes)
        self._counts.note()

    def _finish_gather(self) -> None: ...

    def _drop_values(self) -> None:
        self.version += 1

    def _open_gradients(self, gradients: Loan[None]) -> None:
        self._counts.note()

    def _start_reduce(self, cast: Loan[None] | None, aside: Loan[None] | None) -> None:
        plan, replicas, element = self._counts.job.plan, self._state.replicas, self.sizes.reduce_bytes
        for is_partial, parts in groupby(self._state.places, lambda place: bool(place.summed_over)):
            if is_partial:
                elements = sum(place.num_elements for place in parts)
                self._counts.move("all_reduce", "tp", self.sizes.gradient_bytes * elements)
        places = self._state.places
        collectives = (
            scattered_bucket(plan, places, replicas.num_ranks, self.sizes.size, element)
            if replicas.zero
            else reduced_bucket(plan, places, replicas.num_ranks, element)
        )
        for collective in collectives:
            self._counts.move(collective.kind, replicas.shards_axis, collective.num_bytes)
        if self._counts.is_staged and any(collective.kind == "reduce_scatter" for collective in collectives):
            self._staged_bytes = self.sizes.size * element
            self._counts.staged_bytes += self._staged_bytes
        self._counts.note()

    def _finish_reduce(self, has_sum: bool) -> None:
        self._counts.staged_bytes -= self._staged_bytes
        self._staged_bytes, replicas = 0, self._state.replicas
        if replicas.num_copies > 1:
            num_bytes = self.sizes.shard_size * self.sizes.reduce_bytes
            self._counts.move("all_reduce", replicas.copies_axis, num_bytes)

    def _drop_gradients(self) -> None: ...

    def _begin_update(self, gradients: Loan[None] | None, factor: float, rate: float) -> None:
        self.version += 1
        self._counts.note()

    def _end_update(self) -> None: ...


class _SizedStage(StageEvents[SizedUnit]):
    """A stage whose forwards and backwards are events alone."""

    def __init__(
        self, state: StageState, units: dict[UnitKey, SizedUnit], reductions: Reductions, counts: MovedCounts
    ) -> None:
        mine = {number: units[state.stage, number] for number in range(len(state.units))}
        super().__init__(
            list(mine.values()),
            late={mine[number] for number, unit in enumerate(state.units) if unit.is_late},
            units_in={region: [units[key] for key in keys] for region, keys in state.units_in.items()},
            is_shared=any(unit.replicas.num_ranks > 1 or unit.replicas.num_copies > 1 for unit in state.units),
            reductions=reductions,
            groups=[(group.units, group.scratch_bytes) for group in state.updates],
        )
        self._moved_by_update = [_moved_by_update(state, group) for group in state.updates]
        self._counts = counts
        # Passes over thousands of microbatches ask the same of their stage: what that is, once for all.
        self._gathered = [region for region in state.regions if self.is_gathered(region)]
        self._lends = any(unit.replicas.zero >= 2 for unit in state.units)
        # Experts may keep their values where those of the rest of a layer are gathered for each pass.
        self._cast_together = {
            (region, is_expert): [units[key] for key in dict.fromkeys(state.unit_of[p.name] for p in places)]
            for region, of_region in state.regions.items()
            for is_expert in (False, True)
            if region.isdigit() and (places := [p for p in of_region if p.is_expert == is_expert])
        }
        self._cast: dict[tuple[str, bool], int] = {}
        self._further = set(state.further)
        self._arrivals = {
            kind: {
                region: [units[state.unit_of[place.name]] for place in _gradients_of(places, kind)]
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
            self._counts.move(COLLECTIVES[self._counts.job.optimizer.name], axis, num_bytes)

    def casts(self, keeps_graph: bool) -> Iterator[tuple[str, bool]]:
        """The layers, each by (region, is of experts), whose values are others than they were in the pass before, as
        the next pass begins; of further tokens where that `keeps_graph`."""
        for weights, units in self._cast_together.items():
            if weights[0] in self._further and not keeps_graph:
                continue
            version = sum(unit.version for unit in units)
            if self._cast.get(weights) != version:
                self._cast[weights] = version
                yield weights

    def show_versions(self) -> None:
        """The coming pass is shown the version of its values that it needs."""
        self._cast.clear()

    def forward(self, trains: bool) -> None:
        """A microbatch passes through all regions."""
        for region in self._gathered:
            self.begin_forward(region)
            self.end_forward(region, trains and region != "embedding")

    def backward(self, kind: Kind) -> None:
        """A microbatch's gradient passes back through all regions."""
        if not (self._gathered or self._lends or self.is_armed):
            return
        for region, arrivals in reversed(self._arrivals[kind].items()):
            needs_values = region in self._gathered and region != "embedding" and kind is not Kind.WEIGHT_GRAD
            if needs_values:
                self.begin_backward(region)
            for unit in self._added_before[kind].get(region, ()):
                unit.open()
            for unit in arrivals:
                unit.open()
                self.gradient_arrived(unit)
            if needs_values:
                self.end_backward(region)


def _moved_by_update(state: StageState, group: UpdateGroup) -> list[tuple[str, int]]:
    """The collectives of an update, by axis and bytes."""
    replicas = state.units[group.units[0]].replicas
    moved = group.update.sent_bytes(replicas.index, replicas.cut_index) if group.update is not None else ()
    return [(replicas.shards_axis if along == "shards" else along, num_bytes) for along, num_bytes in moved]


class _Replay:
    def __init__(self, job: JobSpec, held: dict[int, StageState]) -> None:
        self.counts = MovedCounts(job)
        units = {
            (number, n): SizedUnit(unit, self.counts)
            for number, stage in held.items()
            for n, unit in enumerate(stage.units)
        }
        reductions = Reductions()
        self._stages = {number: _SizedStage(stage, units, reductions, self.counts) for number, stage in held.items()}

    def run(self, program: Program, row: tuple[Action, ...]) -> None:
        """Carry out one rank's list."""
        armings = before_reductions(row)
        for index, action in enumerate(row):
            for arming in armings.get(index, ()):
                self._stages[arming.stage].arm(arming.is_last, arming.is_split)
            if action.kind is Kind.STEP:
                self._step(list(self._stages.values()) if action.stage < 0 else [self._stages[action.stage]])
            elif action.kind is Kind.REDUCE:
                self._stages[action.stage].reduce()
            elif action.kind is Kind.GATHER:
                self._stages[action.stage].gather()
            elif action.kind is Kind.RELEASE:
                self._stages[action.stage].release()
            for part in action.computes():
                self._compute(part, program)
            self._message(action)

    def _step(self, stages: list[_SizedStage]) -> None:
        for stage in stages:
            stage.wait()
        for stage in stages:
            stage.reduce_late()
        for stage in stages:
            stage.update(1.0, 0.0)
            stage.zero()

    def _message(self, action: Action) -> None:
        if action.kind in RECV:
            self.counts.messages.add((action.kind, action.stage, action.microbatch))
        elif action.kind in SEND:
            self.counts.messages.discard((action.kind, action.stage, action.microbatch))
            self.counts.has_sent = True  # until the next send it may still be on its way
        self.counts.note()

    def _compute(self, part: Action, program: Program) -> None:
        """A part that another one on this rank follows leaves what that takes, and else what will be sent."""
        stage, i = part.stage, part.microbatch
        again = (stage, i) in program.recomputed
        if part.kind is not Kind.WEIGHT_GRAD and self.counts.job.precision.float8 != "none":
            if program.weights != "current":
                self._stages[stage].show_versions()
            keeps_graph = program.trains and not (again and part.kind is Kind.FORWARD)
            self.counts.num_casts.update((stage, *weights) for weights in self._stages[stage].casts(keeps_graph))
        match part.kind:
            case Kind.FORWARD:
                if not again:  # else its input stays until then
                    self.counts.messages.discard((Kind.RECV_FORWARD, stage, i))
                self._stages[stage].forward(program.trains and not again)
            case Kind.RECOMPUTE:
                self.counts.messages.discard((Kind.RECV_FORWARD, stage, i))
                self._stages[stage].forward(program.trains)
            case Kind.WEIGHT_GRAD:
                self._stages[stage].backward(part.kind)
            case _:
                self.counts.messages.discard((Kind.RECV_BACKWARD, stage, i))
                self._stages[stage].backward(part.kind)
        if part.kind in MAKES:
            self._leave_message(MAKES[part.kind], part, program)

    def _leave_message(self, product: Product, part: Action, program: Program) -> None:
        following, (left, arrived) = part.stage + TRAVELS[product], MESSAGES[product]
        if 0 <= following < program.num_stages:
            rank_of = program.placement.rank
            is_here = rank_of(following, part.microbatch) == rank_of(part.stage, part.microbatch)
            self.counts.messages.add(
                (arrived, following, part.microbatch) if is_here else (left, part.stage, part.microbatch)
            )


def replay(job: JobSpec, program: Program, pp_rank: int, held: dict[int, StageState]) -> Replayed:
    """Replay the list of one pipeline rank, which holds `held`, step after step until the pool grows no more.

    A step begins with the buffers that the one before left, which may fit worse than fresh ones.
    """
    found = _Replay(job, held)
    counts, before = found.counts, -1
    while before < counts.pool.peak_bytes:
        before = counts.pool.peak_bytes
        counts.calls.clear()
        counts.moved_bytes.clear()
        counts.num_casts.clear()
        found.run(program, program.ranks[pp_rank])
    return Replayed(
        dict(counts.calls), dict(counts.moved_bytes), dict(counts.num_casts), counts.pool.peak_bytes, counts.peak_bytes
    )


def _gradients_of(places: tuple[ParameterShard, ...], kind: Kind) -> Iterator[ParameterShard]:
    """The parameters of a region whose gradients a backward adds to, in the order in which they arrive.

    The last parameter used is the first to get its gradient; they are listed in the order of use, but for a bias that
    is listed before its matrix; and a norm adds its two together.
    """
    order = list(places)
    for i, (place, following) in enumerate(pairwise(places)):
        if place.name.endswith("_bias") or following.name == place.name.removesuffix("norm.weight") + "norm.bias":
            order[i : i + 2] = following, place
    for place in reversed(order):
        if kind is Kind.BACKWARD or place.is_put_off == (kind is Kind.WEIGHT_GRAD):
            yield place
