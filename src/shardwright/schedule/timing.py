"""The clock of programs: the start and the end of each action, from the costs of actions.

Every rank has resources that work side by side: compute, one outgoing link for each direction of the pipeline, and
collectives (reductions and gathers, in one queue). Actions on one resource run in the order of the program. So no
event queue is needed: an action starts when its resource is free and all its inputs have arrived, and one pass over
the actions gives all times. Each rank runs its list until an input is missing, and continues when another rank has
made that input. Copies between a device and its host have no resource here, because no action makes one.

Units of time are the caller's: F = 1 for a table of bubbles, seconds for a prediction.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf

from shardwright.config.phrase import say
from shardwright.schedule.action import ADDS, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, RECEIVED, TRAVELS, Product
from shardwright.schedule.lowering.zero3_gathers import stages_needed
from shardwright.schedule.schedule import Program, Schedule


@dataclass(frozen=True)
class Costs:
    """The costs of actions. Tuples are by stage.

    `transfer[s]` is how long a message over the border between stages s and s + 1 occupies its link. The message
    arrives `latency` later, and only its receiver waits for that. An overlapped pair takes `pair` times the sum of its
    parts, and the recompute of a stage takes as long as its forward. `reduce[s]` is the reduction of a stage's
    gradients, `gather[s]` the all-gather of its parameters, `step` the optimizer step.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[float, ...] = ()
    latency: float = 0.0
    pair: float = 1.0
    reduce: tuple[float, ...] = ()
    step: float = 0.0
    gather: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        latency: float = 0.0,
    ) -> "Costs":
        """Equal stages, messages without size."""
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages, latency=latency)

    def compute(self, action: Action) -> float:
        """The cost of a compute action; an overlapped pair may cost less than its parts."""
        kind, stage = action.kind, action.stage
        if kind is Kind.FORWARD or kind is Kind.RECOMPUTE:
            return self.forward[stage]
        if kind is Kind.BACKWARD:
            return self.input_grad[stage] + self.weight_grad[stage]
        if kind is Kind.INPUT_GRAD:
            return self.input_grad[stage]
        if kind is Kind.WEIGHT_GRAD:
            return self.weight_grad[stage]
        assert kind is Kind.OVERLAP, f"{action} computes nothing"
        return self.pair * sum(self.compute(part) for part in action.parts)


@dataclass(frozen=True)
class Times:
    """Start and end of every action, by rank, in the order of the program's lists; the lists of steps are joined."""

    rows: tuple[tuple[Action, ...], ...]
    start: list[list[float]]
    end: list[list[float]]

    @property
    def makespan(self) -> float:
        """When the last action ends; the first begins at 0."""
        return max((max(row, default=0.0) for row in self.end), default=0.0)

    def num_steps(self, schedule: Schedule) -> int:
        """The number of steps that the schedule was played for."""
        return len(self.rows[0]) // len(schedule.ranks[0])


def play(program: Program, costs: Costs, num_steps: int = 1) -> Times:
    """Run a program `num_steps` times back to back. ValueError if some action can never run.

    No rank waits for all others at the end of a step: a rank begins the next one when its own is done.
    """
    return play_on(program, costs, num_steps, num_steps)[0]


def play_on(
    schedule: Schedule, costs: Costs, num_kept: int, num_steps: int, later: Schedule | None = None
) -> tuple[Times, list[float]]:
    """(times of the actions of the first `num_kept` steps, when each of all steps has ended on all ranks).

    In a schedule without messages, each message leaves when it is made, as in the program that the schedule is lowered
    to. So `later` may be the same schedule without messages, for the steps whose times are not kept.
    """
    clock, step_ends, latest = _Clock(schedule, costs, [_Rank() for _ in schedule.ranks]), list[float](), 0.0
    previous_offsets: list[float] = []
    first_times = Times(tuple(row * num_kept for row in schedule.ranks), *_empty_starts_and_ends(schedule))
    for step in range(num_steps):
        if step == num_kept and later is not None:
            clock = _Clock(later, costs, clock.ranks)
        starts, ends = _empty_starts_and_ends(schedule)
        clock.run_step(starts, ends)
        latest = max([latest, *(max(row, default=0.0) for row in ends)])
        step_ends.append(latest)
        if step < num_kept:
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                first_times.start[number] += start
                first_times.end[number] += end
        # If all ranks end a step just as they ended the previous one, only later, each further step takes as long.
        if step + 1 >= num_kept and _are_exact(costs, latest * num_steps):
            offsets = [moment - latest if moment else 0.0 for rank in clock.ranks for moment in rank.moments()]
            if offsets == previous_offsets:
                further_ends = (latest + n * (latest - step_ends[-2]) for n in range(1, num_steps - step))
                return first_times, [*step_ends, *further_ends]
            previous_offsets = offsets
    return first_times, step_ends


def _are_exact(costs: Costs, most: float) -> bool:
    """True if sums of such costs up to `most` have no rounding errors: multiples of 2^-16, of at most 53 bits."""
    by_stage = (costs.forward, costs.input_grad, costs.weight_grad, costs.transfer, costs.reduce, costs.gather)
    values = (value for group in (*by_stage, (costs.latency, costs.step)) for value in group)
    return most < 2**36 and costs.pair == 1 and all(float(value * 2**16).is_integer() for value in values)


def _empty_starts_and_ends(schedule: Schedule) -> tuple[list[list[float]], list[list[float]]]:
    """An empty list of starts and one of ends for each rank."""
    return [[] for _ in schedule.ranks], [[] for _ in schedule.ranks]


# The ways of a product when it is made. Nothing happens: the list has its send, or no stage takes it. It stays: the
# stage that takes it is on the same rank. It leaves: it is sent at once.
_NOTHING, _STAYS, _LEAVES = range(3)
_NEVER = inf  # the time of what has not happened yet
# Constants, because they are looked up for every action.
_STEP, _RELEASE, _GATHER = Kind.STEP, Kind.RELEASE, Kind.GATHER
# Products as plain integers, which index lists.
_MAKES, _RECEIVED = ({kind: int(product) for kind, product in table.items()} for table in (MAKES, RECEIVED))
_SENT = {send: int(product) for product, (send, _) in MESSAGES.items()}


@dataclass(slots=True)
class _Rank:
    """The times when a rank's resources are free again, and the times that its collectives and its update wait for."""

    compute: float = 0.0
    links: list[float] = field(default_factory=lambda: [0.0] * len(Product))  # by the product that travels on it
    queue: float = 0.0  # of collectives
    computed: float = 0.0  # the end of its last computation
    reduced: float = 0.0  # the end of the last reduction since its last update
    gathered: dict[int, float] = field(default_factory=dict)  # by stage: when its parameters are gathered
    added: dict[int, float] = field(default_factory=dict)  # by stage: the last addition to its gradients

    def moments(self) -> tuple[float, ...]:
        """All times that the next step depends on; 0 for a resource that is never used."""
        return self.compute, *self.links, self.queue, self.computed


class _Clock:
    """The state of all ranks, which lasts from step to step."""

    def __init__(self, schedule: Schedule, costs: Costs, ranks: list[_Rank]) -> None:
        self.schedule, self.costs, self.ranks = schedule, costs, ranks
        backward = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
        self.seconds: dict[Kind, Sequence[float]] = {
            Kind.FORWARD: costs.forward,
            Kind.RECOMPUTE: costs.forward,
            Kind.BACKWARD: backward,
            Kind.INPUT_GRAD: costs.input_grad,
            Kind.WEIGHT_GRAD: costs.weight_grad,
        }
        zeros = (0.0,) * schedule.num_stages
        self.reduce_s, self.gather_s = costs.reduce or zeros, costs.gather or zeros
        # By product: the distance to its taker's n (see `_Step`), and by stage the time that it occupies its link.
        self.shift = [TRAVELS[product] * schedule.num_microbatches for product in Product]
        transfer_s = costs.transfer or zeros
        self.link_s = [[0.0] * max(0, -TRAVELS[product]) + list(transfer_s) for product in Product]
        sends = _NOTHING if isinstance(schedule, Program) else _LEAVES
        self.ways = []  # by copy, product and stage
        for row in schedule.placement.holders:
            borders = [_STAYS if rank == next_rank else sends for rank, next_rank in pairwise(row)]
            ways_of_direction = {1: [*borders, _NOTHING], -1: [_NOTHING, *borders]}
            self.ways.append([ways_of_direction[TRAVELS[product]] for product in Product])
        # If two ranks hold a stage, its reduction waits for the last addition on both.
        self.last_added = _last_added(schedule) if schedule.placement.num_copies > 1 else {}

    def run_step(self, starts: list[list[float]], ends: list[list[float]]) -> None:
        """Run all lists once, and append the start and the end of each action to the empty lists of its rank."""
        step = _Step(self)
        while step.runnable:
            number = step.runnable.popleft()
            step.run_rank(number, starts[number], ends[number])
        self._check_all_ran(list(map(len, ends)))
        for rank, ended in zip(self.ranks, ends, strict=True):
            rank.computed, rank.reduced = (ended[-1] if ended else 0.0), 0.0
            rank.gathered.clear()
            rank.added.clear()

    def _check_all_ran(self, num_run: list[int]) -> None:
        waits = [
            say("rank {rank} waits at {action} (its action {index})", rank=rank, action=str(row[index]), index=index)
            for rank, (row, index) in enumerate(zip(self.schedule.ranks, num_run, strict=True))
            if index < len(row)
        ]
        if waits:
            raise ValueError(say("program {name} stops for ever: {waits}", name=self.schedule.name, waits=tuple(waits)))


class _Step:
    """One step of all ranks: the products that are made and sent, and the ranks that wait for them.

    Lists are by product, and by n = stage x microbatches + microbatch of the computation that makes or takes it.
    """

    def __init__(self, clock: _Clock) -> None:
        self._clock, schedule, m = clock, clock.schedule, clock.schedule.num_microbatches
        self._num_pairs = num_pairs = schedule.num_stages * m
        # When the stage of n made a product; when a product for the stage of n was sent, and when it arrived.
        self._made_at, self._sent_at, self._arrived_at = ([[_NEVER] * num_pairs for _ in Product] for _ in range(3))
        self._arrived_at[Product.OUTPUT][:m] = self._arrived_at[Product.GRADIENT][-m:] = [
            0.0
        ] * m  # tokens, and the loss
        # By kind: for each product that it needs, the table of its times and the number of its event less n; the
        # product that it makes; True if it adds to gradients.
        self._rules = {
            kind: (
                [
                    ((self._arrived_at if need.stage else self._made_at)[need.product], need.product * num_pairs)
                    for need in needs
                ],
                _MAKES.get(kind),
                kind in ADDS,
            )
            for kind, needs in NEEDS.items()
        }
        self._added_at = [_NEVER] * num_pairs  # when the gradients of n were added
        self._complete_at: dict[tuple[int, int], float] = {}  # (rank, stage): when a copy's gradients are complete
        self._waiting: dict[object, int] = {}  # event to the rank that waits: product x num_pairs + n, or (rank, stage)
        self._lists = [iter(row) for row in schedule.ranks]
        self._to_run: list[Iterator[Action]] = list(self._lists)  # with the action that a rank waits at put back first
        self.runnable = deque(range(len(clock.ranks)))  # the rank that waits longest first: it goes further then

    def run_rank(self, number: int, starts: list[float], ends: list[float]) -> None:
        """Run a rank's list until an input is missing; then the rank continues when another rank has made it."""
        clock, rank, rules = self._clock, self._clock.ranks[number], self._rules
        seconds, m, now = clock.seconds, clock.schedule.num_microbatches, rank.compute
        for action in self._to_run[number]:
            kind, stage, microbatch, _, parts = action
            awaited: object = None
            if kind in seconds or parts:
                start = now
                for part_kind, part_stage, i, _, _ in parts or (action,):
                    n = part_stage * m + i
                    for table, event in rules[part_kind][0]:
                        if table[n] > start:
                            start, awaited = table[n], event + n
                if start != _NEVER:
                    if rank.gathered:
                        start = max([start, *(rank.gathered.get(needed, 0.0) for needed in stages_needed(action))])
                    now = end = start + (clock.costs.compute(action) if parts else seconds[kind][stage])
                    rank.computed = end
                    for part in parts or (action,):
                        self._finish(number, rank, part, end)
            elif kind in _SENT:
                start, end = self._send(rank, _SENT[kind], stage * m + microbatch, stage)
            elif kind in _RECEIVED:
                product, n = _RECEIVED[kind], stage * m + microbatch
                start, end = self._sent_at[product][n], self._arrived_at[product][n]
                awaited = product * self._num_pairs + n
            elif kind is _STEP:
                start = max(now, rank.reduced)
                now = end = start + clock.costs.step
                rank.reduced = 0.0
            elif kind is _RELEASE:
                start = end = rank.computed
            elif kind is _GATHER:  # issued when the rank has ended the computation before it
                start = max(rank.queue, rank.computed)
                rank.queue = rank.gathered[stage] = end = start + clock.gather_s[stage]
            else:
                start, end, awaited = self._reduce(rank, stage, microbatch)
            if start == _NEVER:
                self._to_run[number] = chain((action,), self._lists[number])
                if awaited is not None:
                    self._waiting[awaited] = number
                break
            starts.append(start)
            ends.append(end)
        rank.compute = now

    def _finish(self, number: int, rank: _Rank, part: Action, end: float) -> None:
        """Record the end of a computation: its product is made, and its gradients are added."""
        kind, stage, i, _, _ = part
        clock = self._clock
        n = stage * clock.schedule.num_microbatches + i
        _, product, adds = self._rules[kind]
        if product is not None:
            self._made_at[product][n] = end
            copy_of = clock.schedule.placement.copy_of
            way = clock.ways[copy_of[i] if copy_of else 0][product][stage]
            if way is _LEAVES:
                self._send(rank, product, n, stage)
            elif way is _STAYS:
                self._arrived_at[product][n + clock.shift[product]] = end
        if adds:
            self._added_at[n] = rank.added[stage] = end
            if clock.last_added and clock.last_added.get((number, stage)) == i:
                self._complete_at[number, stage] = end
                self._wake((number, stage))

    def _send(self, rank: _Rank, product: int, n: int, stage: int) -> tuple[float, float]:
        """Send a product over its link: (when it starts, when the link is free again)."""
        clock = self._clock
        taker = n + clock.shift[product]
        start, free = self._made_at[product][n], rank.links[product]
        if free > start:
            start = free
        rank.links[product] = end = self._sent_at[product][taker] = start + clock.link_s[product][stage]
        self._arrived_at[product][taker] = end + clock.costs.latency
        self._wake(product * self._num_pairs + taker)
        return start, end

    def _reduce(self, rank: _Rank, stage: int, microbatch: int) -> tuple[float, float, object]:
        """Start and end of a reduction, and the event that it waits for if its gradients are not complete yet."""
        clock, awaited = self._clock, None
        if microbatch >= 0:  # in an asynchronous schedule: the gradients of one microbatch
            start = self._added_at[stage * clock.schedule.num_microbatches + microbatch]
        elif not clock.last_added:
            start = rank.added.get(stage, _NEVER)
        else:  # once a step: the gradients of every copy of the stage must be complete
            copies = [(holder, stage) for holder in set(clock.schedule.placement.replicas(stage))]
            awaited = next((copy for copy in copies if copy not in self._complete_at), None)
            start = max(self._complete_at.get(copy, _NEVER) for copy in copies)
        if start == _NEVER:
            return start, start, awaited
        start = max(rank.queue, start)
        rank.queue = rank.reduced = start + clock.reduce_s[stage]
        return start, rank.queue, awaited

    def _wake(self, event: object) -> None:
        """Make the rank that waits for an event runnable."""
        if event in self._waiting:
            self.runnable.append(self._waiting.pop(event))


def _last_added(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Map (rank, stage) to the microbatch whose gradients the rank adds last."""
    return {
        (rank, part.stage): part.microbatch
        for rank, row in enumerate(schedule.ranks)
        for action in row
        for part in action.computes()
        if part.kind in ADDS
    }
