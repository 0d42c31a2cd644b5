"""What the ZeRO engine borrows and moves in a step, replayed from the program without ranks.

The same events in the same order as in parallel/zero/sharded_stage.py and parallel/zero/flat_unit.py, on sizes in place
of tensors: which values are gathered when, which gradients have memory, what is being reduced. So the collectives are
those of the ledger, and the peak of the pool is that of parallel/zero/buffers.py. One thing is not known beforehand:
where two passes run side by side (DualPipe), which of them borrows first. They are replayed one after the other.

In stage 3 this is why less than 3P is gathered and scattered (P the bytes of all parameters; Rajbhandari et al. 2020,
arXiv 1910.02054, section 7.2): the embedding's backward needs no table, and the last region of a stage stays between
a forward and the backward after it.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from shardwright.account.compression import reduced_bucket, scattered_bucket
from shardwright.account.rank_state import StageState, UnitKey, UnitState
from shardwright.config.job import JobSpec
from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, TRAVELS, Product
from shardwright.schedule.lowering.reductions import before_reductions
from shardwright.schedule.schedule import Program
from shardwright.sharding.buckets import MOST_REDUCING
from shardwright.sharding.parameter_shard import Place

_MASTER_BYTES = 4  # of an element that the optimizer updates


@dataclass(frozen=True)
class Replayed:
    """What one run of a program needs on a rank, in bytes.

    `moved` counts (collective, mesh axis) by calls and by bytes of the full tensor, as the ledger does. `pool_bytes`
    is the peak of the buffer pool; `buffers_bytes` that of the pool, what waits for or is in a pipeline message, and
    what a reduce-scatter needs besides its operands.
    """

    calls: dict[tuple[str, str], int]
    moved_bytes: dict[tuple[str, str], int]
    pool_bytes: int
    buffers_bytes: int


class _Pool:
    """parallel/zero/buffers.py on sizes: the smallest free buffer that is large enough, or else a new one."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.held_bytes = 0
        self.peak_bytes = 0

    def borrow(self, num_bytes: int) -> int:
        """Returns the bytes of the buffer that was lent."""
        fitting = [size for size in self._free if size >= num_bytes]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        if self._free:
            smallest = min(self._free)
            self._free.remove(smallest)
            self.held_bytes -= smallest
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return num_bytes

    def give_back(self, buffer: int) -> None:
        self._free.append(buffer)


class _Replay:
    def __init__(self, job: JobSpec, held: dict[int, StageState], message_bytes: int, is_staged: bool) -> None:
        self._job = job
        self._stages = held
        self._message_bytes = message_bytes
        self._is_staged = is_staged
        self._compute_bytes = job.precision.compute_bytes
        self._gradient_bytes = job.precision.gradient_bytes
        self._reduce_bytes = job.precision.reduce_bytes
        self.pool = _Pool()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        self.peak_bytes = 0
        self._values: dict[UnitKey, int] = {}  # buffers of gathered values
        self._gradients: dict[UnitKey, int] = {}  # buffers of whole gradients
        self._reducing: dict[UnitKey, list[int]] = {}  # what reductions under way have borrowed, in order of return
        self._staged: dict[UnitKey, int] = {}  # and what they need besides
        self._has_sum: set[UnitKey] = set()
        self._under_way: dict[int, deque[UnitKey]] = {stage: deque() for stage in held}
        self._next: dict[int, int] = dict.fromkeys(held, 0)
        self._missing: dict[UnitKey, int] = {}
        self._armed: set[int] = set()
        self._holds: Counter[UnitKey] = Counter()  # how many stages want the values kept
        self._messages: set[tuple[Kind, int, int]] = set()
        self._has_sent = False
        # Passes over thousands of microbatches ask the same of their stage: what that is, once for all.
        self._prompt = {stage.stage: _prompt(stage) for stage in held.values()}
        self._due = dict(self._prompt)  # by stage: the units of the next reduction
        self._arrivals = {
            (stage.stage, kind): {region: _arrivals(stage, region, kind) for region in stage.regions}
            for stage in held.values()
            for kind in (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        }
        self._gathers = {
            stage.stage: any(self._unit(key).replicas.zero == 3 for keys in stage.units_in.values() for key in keys)
            for stage in held.values()
        }
        self._lends = {stage.stage: any(unit.replicas.zero >= 2 for unit in stage.units) for stage in held.values()}

    def run(self, program: Program, row: tuple[Action, ...]) -> None:
        """Carry out one rank's list."""
        armings = before_reductions(row)
        for index, action in enumerate(row):
            for arming in armings.get(index, ()):
                self._arm(arming.stage, arming.is_last)
            if action.kind is Kind.STEP:
                self._step([action.stage] if action.stage >= 0 else list(self._stages), program.weights == "current")
            elif action.kind is Kind.REDUCE:
                self._reduce(action.stage)
            elif action.kind is Kind.GATHER:
                for key in self._all_units(action.stage):
                    self._holds[key] += 1
                    self._gather(key)
            elif action.kind is Kind.RELEASE:
                for key in self._all_units(action.stage):
                    self._holds[key] -= 1
                    self._release(key)
            for part in action.computes():
                self._compute(part, program)
            self._message(action)

    # Messages, and what waits for another stage on this rank.

    def _message(self, action: Action) -> None:
        if action.kind in RECV:
            self._messages.add((action.kind, action.stage, action.microbatch))
        elif action.kind in SEND:
            self._messages.discard((action.kind, action.stage, action.microbatch))
            self._has_sent = True  # until the next send it may still be on its way
        self._note()

    def _compute(self, part: Action, program: Program) -> None:
        """A part that another one on this rank follows leaves what that takes, and else what will be sent."""
        stage, i = part.stage, part.microbatch
        again = (stage, i) in program.recomputed
        match part.kind:
            case Kind.FORWARD:
                if not again:  # else its input stays until then
                    self._messages.discard((Kind.RECV_FORWARD, stage, i))
                self._forward(stage, program.trains and not again)
            case Kind.RECOMPUTE:
                self._messages.discard((Kind.RECV_FORWARD, stage, i))
                self._forward(stage, program.trains)
            case Kind.WEIGHT_GRAD:
                self._backward(stage, part.kind)
            case _:
                self._messages.discard((Kind.RECV_BACKWARD, stage, i))
                self._backward(stage, part.kind)
        if part.kind in MAKES:
            self._leave_message(MAKES[part.kind], part, program)

    def _leave_message(self, product: Product, part: Action, program: Program) -> None:
        following, (left, arrived) = part.stage + TRAVELS[product], MESSAGES[product]
        if 0 <= following < program.num_stages:
            rank_of = program.placement.rank
            is_here = rank_of(following, part.microbatch) == rank_of(part.stage, part.microbatch)
            self._messages.add(
                (arrived, following, part.microbatch) if is_here else (left, part.stage, part.microbatch)
            )

    # Values.

    def _unit(self, key: UnitKey) -> UnitState:
        return self._stages[key[0]].units[key[1]]

    def _all_units(self, stage: int) -> list[UnitKey]:
        return list(dict.fromkeys(key for keys in self._stages[stage].units_in.values() for key in keys))

    def _gather(self, key: UnitKey) -> None:
        replicas = self._unit(key).replicas
        if replicas.zero == 3 and key not in self._values:
            num_bytes = self._unit(key).layout.size * self._compute_bytes
            self._values[key] = self.pool.borrow(num_bytes)
            if replicas.num_ranks > 1:
                self._move("all_gather", replicas.shards_axis, num_bytes)
            self._note()

    def _release(self, key: UnitKey) -> None:
        if key in self._values and not self._holds[key]:
            self.pool.give_back(self._values.pop(key))

    def _enter(self, stage: StageState, region: str, following: str | None) -> None:
        for key in stage.units_in[region]:
            self._gather(key)
        for key in stage.units_in[following] if following is not None else ():
            self._gather(key)

    def _leave(self, stage: StageState, region: str) -> None:
        for key in stage.units_in[region]:
            self._release(key)

    def _forward(self, number: int, trains: bool) -> None:
        if not self._gathers[number]:
            return
        stage = self._stages[number]
        order = list(stage.regions)
        for region, following in zip(order, [*order[1:], None], strict=True):
            self._enter(stage, region, following)
            if not (trains and following is None and region != "embedding"):
                self._leave(stage, region)

    def _backward(self, number: int, kind: Kind) -> None:
        if not (self._gathers[number] or self._lends[number] or number in self._armed):
            return
        stage = self._stages[number]
        order = list(stage.regions)
        for region, before in zip(reversed(order), [*reversed(order[:-1]), None], strict=True):
            needs_values = region != "embedding" and kind is not Kind.WEIGHT_GRAD
            if needs_values:
                self._enter(stage, region, before if before != "embedding" else None)
            for key in self._arrivals[number, kind][region]:
                self._arrive(number, key)
            if needs_values:
                self._leave(stage, region)

    # Gradients.

    def _arm(self, number: int, is_last: bool) -> None:
        stage = self._stages[number]
        self._due[number] = [key for key in self._prompt[number] if is_last or self._unit(key).replicas.zero >= 2]
        if any(unit.replicas.num_ranks > 1 or unit.replicas.num_copies > 1 for unit in stage.units):
            self._armed.add(number)
        self._next[number] = 0
        for n, unit in enumerate(stage.units):
            self._missing[number, n] = len(unit.places)

    def _arrive(self, number: int, key: UnitKey) -> None:
        self._open(key)
        if number not in self._armed:
            return
        self._missing[key] -= 1
        due = self._due[number]
        while self._next[number] < len(due) and self._missing[due[self._next[number]]] <= 0:
            self._start_next(number)

    def _start_next(self, number: int) -> None:
        under_way = self._under_way[number]
        key = self._due[number][self._next[number]]
        self._next[number] += 1
        while len(under_way) >= MOST_REDUCING:
            self._finish_reduce(under_way.popleft())
        self._start_reduce(key)
        under_way.append(key)

    def _open(self, key: UnitKey) -> None:
        if self._unit(key).replicas.zero < 2:
            return
        self._finish_reduce(key)
        if key not in self._gradients:
            self._gradients[key] = self.pool.borrow(self._unit(key).layout.size * self._gradient_bytes)
            self._note()

    def _start_reduce(self, key: UnitKey) -> None:
        self._finish_reduce(key)
        self._open(key)
        unit, replicas = self._unit(key), self._unit(key).replicas
        layout, element = unit.layout, self._reduce_bytes
        is_cast = element != self._gradient_bytes
        borrowed = [self.pool.borrow(layout.size * element)] if is_cast else []
        if replicas.zero and (is_cast or (replicas.zero >= 2 and key in self._has_sum)):
            borrowed.insert(0, self.pool.borrow(layout.shard_size * element))
        shapes = [place.shape for place in unit.places]
        collectives = (
            scattered_bucket(self._job.plan, shapes, replicas.num_ranks, layout.size, element)
            if replicas.zero
            else reduced_bucket(self._job.plan, shapes, replicas.num_ranks, element)
        )
        for collective in collectives:
            self._move(collective.kind, replicas.shards_axis, collective.num_bytes)
        self._reducing[key] = borrowed
        scatters = any(collective.kind == "reduce_scatter" for collective in collectives)
        self._staged[key] = layout.size * element if scatters and self._is_staged else 0
        self._note()

    def _finish_reduce(self, key: UnitKey) -> None:
        if key not in self._reducing:
            return
        borrowed = self._reducing.pop(key)
        del self._staged[key]
        layout, replicas = self._unit(key).layout, self._unit(key).replicas
        if replicas.num_copies > 1:
            self._move("all_reduce", replicas.copies_axis, layout.shard_size * self._reduce_bytes)
        for buffer in borrowed:
            self.pool.give_back(buffer)
        if replicas.zero >= 2:
            self.pool.give_back(self._gradients.pop(key))
            self._has_sum.add(key)

    def _reduce(self, number: int) -> None:
        self._armed.discard(number)
        while self._next[number] < len(self._due[number]):
            self._start_next(number)

    # Update.

    def _step(self, numbers: list[int], has_late: bool) -> None:
        for number in numbers:
            while self._under_way[number]:
                self._finish_reduce(self._under_way[number].popleft())
            self._next[number] = 0
        for number in numbers if has_late else ():
            late = [(number, n) for n, unit in enumerate(self._stages[number].units) if unit.is_late]
            for key in late:
                self._start_reduce(key)
            for key in late:
                self._finish_reduce(key)
        for number in numbers:
            stage = self._stages[number]
            for unit in stage.units:
                if self._gradient_bytes != _MASTER_BYTES:
                    self.pool.give_back(self.pool.borrow(unit.layout.shard_size * _MASTER_BYTES))
                    self._note()
                if unit.replicas.zero in (1, 2):
                    self._move("all_gather", unit.replicas.shards_axis, unit.layout.size * self._compute_bytes)
            self._has_sum -= {(number, n) for n in range(len(stage.units))}

    def _move(self, collective: str, axis: str, num_bytes: int) -> None:
        self.calls[collective, axis] += 1
        self.moved_bytes[collective, axis] += num_bytes

    def _note(self) -> None:
        messages = (len(self._messages) + self._has_sent) * self._message_bytes
        self.peak_bytes = max(self.peak_bytes, self.pool.held_bytes + sum(self._staged.values()) + messages)


def replay(job: JobSpec, program: Program, pp_rank: int, held: dict[int, StageState]) -> Replayed:
    """Replay the list of one pipeline rank, which holds `held`, step after step until the pool grows no more.

    A step begins with the buffers that the one before left, which may fit worse than fresh ones.
    """
    # Gloo's reduce-scatter is an exchange of shares, which need memory (parallel/comm/collectives.py).
    found = _Replay(job, held, message_bytes(job), runs_on_cpu(job))
    before = -1
    while before < found.pool.peak_bytes:
        before = found.pool.peak_bytes
        found.calls.clear()
        found.moved_bytes.clear()
        found.run(program, program.ranks[pp_rank])
    return Replayed(dict(found.calls), dict(found.moved_bytes), found.pool.peak_bytes, found.peak_bytes)


def message_bytes(job: JobSpec) -> int:
    """What passes between two stages of a pipeline: hidden states [s, B, H]."""
    return job.tokens_between * job.plan.microbatch_size * job.model.hidden * job.precision.compute_bytes


def runs_on_cpu(job: JobSpec) -> bool:
    """Whether ranks are processes on CPUs, over Gloo: where the job does not say otherwise."""
    return job.run.device == "cpu" or (job.run.device == "auto" and job.cluster.device == "unknown")


def _prompt(stage: StageState) -> list[UnitKey]:
    """The units that are reduced beside the backward, in the order in which it is done with them."""
    return [(stage.stage, n) for n, unit in reversed(list(enumerate(stage.units))) if not unit.is_late]


def _arrivals(stage: StageState, region: str, kind: Kind) -> list[UnitKey]:
    """The unit of each gradient of a region, in the order in which gradients arrive."""
    return [stage.unit_of[place.name] for place in _gradients_of(region, stage.regions[region], kind)]


def _gradients_of(region: str, places: tuple[Place, ...], kind: Kind) -> Iterator[Place]:
    """The parameters of a region whose gradients a backward adds to, in the order in which they arrive.

    W adds those of linear layers, and I all others. The last parameter used is the first to get its gradient; they
    are listed in the order of use, but for a bias that is listed before its matrix; and a norm adds its two together.
    """
    order = list(places)
    for i, (place, following) in enumerate(pairwise(places)):
        if place.name.endswith("_bias") or following.name == place.name.removesuffix("norm.weight") + "norm.bias":
            order[i : i + 2] = following, place
    for place in reversed(order):
        is_linear = place.init == "normal" and region != "embedding"
        if kind is Kind.BACKWARD or is_linear == (kind is Kind.WEIGHT_GRAD):
            yield place
