"""When each action of a program runs, given what each one costs.

Every rank has resources that work side by side: compute, one outgoing link for each direction of the pipeline, and
collectives (reductions and gathers, in one queue). Actions on one resource run in the order of the program. So no
event queue is needed: the start of an action is the latest of its resource becoming free and its inputs being there,
and one pass over the actions gives all times: each rank runs its list until an input is not there yet, and goes on when
the rank that makes it has come so far. Copies between a device and its host have no resource here: no action makes any.

Units of time are the caller's: F = 1 for a table of bubbles, seconds for a prediction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf

from shardwright.schedule.action import ADDS, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, RECEIVED, TRAVELS, Product
from shardwright.schedule.lowering.zero3_gathers import stages_needed
from shardwright.schedule.schedule import Program, Schedule


@dataclass(frozen=True)
class Costs:
    """The costs of actions. Tuples are by stage.

    `transfer[s]` is how long a message over the border between stages s and s + 1 occupies its link; `latency` more
    passes until it is there, and holds up nobody but the receiver. An overlapped pair takes `pair` times the sum of
    its parts, and computing a stage again its forward. `reduce[s]` is a stage's gradient reduction, `gather[s]` the
    gathering of its parameters, `step` the optimizer's.
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
        cls, num_stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
        latency: float = 0.0,
    ) -> "Costs":  # fmt: skip
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
    """Start and end of every action, by rank, in the order of the program's lists (one after the other for steps)."""

    rows: tuple[tuple[Action, ...], ...]
    start: list[list[float]]
    end: list[list[float]]

    @property
    def makespan(self) -> float:
        """When the last action ends; the first begins at 0."""
        return max((max(row, default=0.0) for row in self.end), default=0.0)

    def num_steps(self, schedule: Schedule) -> int:
        """How often the schedule was played."""
        return len(self.rows[0]) // len(schedule.ranks[0])


def play(program: Program, costs: Costs, num_steps: int = 1) -> Times:
    """Run a program `num_steps` times back to back. ValueError if some action can never run.

    No rank waits for all others at the end of a step: a rank begins the next one when its own is done.
    """
    return play_on(program, costs, num_steps, num_steps)[0]


def play_on(
    schedule: Schedule, costs: Costs, num_kept: int, num_steps: int, later: Schedule | None = None
) -> tuple[Times, list[float]]:
    """(times of the first steps, when each of all steps has ended on all ranks). Those of later ones are not kept.

    A schedule without messages in its lists is played as if each left when it is made, as it does in the program that
    the schedule is lowered to; so `later` may be the same without messages, for steps that are not kept.
    """
    clock, found, latest = _Clock(schedule, costs, [_Rank() for _ in schedule.ranks]), list[float](), 0.0
    before: list[float] = []
    kept = Times(tuple(row * num_kept for row in schedule.ranks), *_two_of_each(schedule))
    for step in range(num_steps):
        if step == num_kept and later is not None:
            clock = _Clock(later, costs, clock.ranks)
        starts, ends = _two_of_each(schedule)
        clock.run_step(starts, ends)
        latest = max([latest, *(max(row, default=0.0) for row in ends)])
        found.append(latest)
        if step < num_kept:
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                kept.start[number] += start
                kept.end[number] += end
        # Where all ranks end a step as they ended the one before, only later, each further step takes as long.
        if step + 1 >= num_kept and _are_exact(costs, latest * num_steps):
            after = [moment - latest if moment else 0.0 for rank in clock.ranks for moment in rank.moments()]
            if after == before:
                return kept, [*found, *(latest + n * (latest - found[-2]) for n in range(1, num_steps - step))]
            before = after
    return kept, found


def _are_exact(costs: Costs, most: float) -> bool:
    """True if sums of such costs up to `most` have no rounding errors: multiples of 2^-16, of at most 53 bits."""
    of_stages = (costs.forward, costs.input_grad, costs.weight_grad, costs.transfer, costs.reduce, costs.gather)
    of_all = (cost for of in (*of_stages, (costs.latency, costs.step)) for cost in of)
    return most < 2**36 and costs.pair == 1 and all(float(cost * 2**16).is_integer() for cost in of_all)


def _two_of_each(schedule: Schedule) -> tuple[list[list[float]], list[list[float]]]:
    """An empty list of starts and one of ends for each rank."""
    return [[] for _ in schedule.ranks], [[] for _ in schedule.ranks]


# What becomes of a product where it was made: a send stands in the list (or nobody takes it), the stage that takes it
# is on this rank too, or it leaves at once.
_NOTHING, _STAYS, _LEAVES = range(3)
_NEVER = inf  # when something is there that is not yet
# Looked up for every action.
_STEP, _RELEASE, _GATHER = Kind.STEP, Kind.RELEASE, Kind.GATHER
# Products as plain numbers, by which lists are indexed.
_MAKES, _RECEIVED = ({kind: int(product) for kind, product in of.items()} for of in (MAKES, RECEIVED))
_SENT = {send: int(product) for product, (send, _) in MESSAGES.items()}


@dataclass(slots=True)
class _Rank:
    """When the resources of a rank are free again, and what its collectives and its update wait for."""

    compute: float = 0.0
    links: list[float] = field(default_factory=lambda: [0.0] * len(Product))  # by what travels on each
    queue: float = 0.0  # of collectives
    computed: float = 0.0  # the end of its last computation
    reduced: float = 0.0  # the end of the last reduction since its last update
    gathered: dict[int, float] = field(default_factory=dict)  # by stage: when its parameters are there
    added: dict[int, float] = field(default_factory=dict)  # by stage: the last addition to its gradients

    def moments(self) -> tuple[float, ...]:
        """All that the next step depends on; 0 is of what is never used."""
        return self.compute, *self.links, self.queue, self.computed


class _Clock:
    """All ranks, which go on from step to step."""

    def __init__(self, schedule: Schedule, costs: Costs, ranks: list[_Rank]) -> None:
        self.schedule, self.costs, self.ranks = schedule, costs, ranks
        both = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
        self.seconds: dict[Kind, Sequence[float]] = {
            Kind.FORWARD: costs.forward,
            Kind.RECOMPUTE: costs.forward,
            Kind.BACKWARD: both,
            Kind.INPUT_GRAD: costs.input_grad,
            Kind.WEIGHT_GRAD: costs.weight_grad,
        }
        zeros = (0.0,) * schedule.num_stages
        self.reduce_s, self.gather_s = costs.reduce or zeros, costs.gather or zeros
        # By product: how far its taker's n is (`_Step`), and by stage the time that it occupies its link.
        self.shift = [TRAVELS[product] * schedule.num_microbatches for product in Product]
        transfer_s = costs.transfer or zeros
        self.link_s = [[0.0] * max(0, -TRAVELS[product]) + list(transfer_s) for product in Product]
        sends = _NOTHING if isinstance(schedule, Program) else _LEAVES
        self.ways = []  # by copy, product and stage
        for row in schedule.placement.holders:
            borders = [_STAYS if here == there else sends for here, there in pairwise(row)]
            ahead_and_back = {1: [*borders, _NOTHING], -1: [_NOTHING, *borders]}
            self.ways.append([ahead_and_back[TRAVELS[product]] for product in Product])
        # Where a stage is there twice, its reduction waits for the last addition on every rank that holds it.
        self.last_added = _last_added(schedule) if schedule.placement.num_copies > 1 else {}

    def run_step(self, starts: list[list[float]], ends: list[list[float]]) -> None:
        """Run all lists once more, and put the start and the end of each action into the empty lists of its rank."""
        step = _Step(self)
        while step.runnable:
            number = step.runnable.pop()
            step.run_rank(number, starts[number], ends[number])
        self._check_all_ran(list(map(len, ends)))
        for rank, ended in zip(self.ranks, ends, strict=True):
            rank.computed, rank.reduced = (ended[-1] if ended else 0.0), 0.0
            rank.gathered.clear()
            rank.added.clear()

    def _check_all_ran(self, num_run: list[int]) -> None:
        waits = [
            f"rank {rank} waits at {row[index]} (its action {index})"
            for rank, (row, index) in enumerate(zip(self.schedule.ranks, num_run, strict=True))
            if index < len(row)
        ]
        if waits:
            raise ValueError(f"program {self.schedule.name} stops for ever: {', '.join(waits)}")


class _Step:
    """One step of all ranks: which products are made and where, and who waits for what.

    Lists are by product, and by n = stage x microbatches + microbatch of the computation that makes or takes it.
    """

    def __init__(self, clock: _Clock) -> None:
        self._clock, schedule, m = clock, clock.schedule, clock.schedule.num_microbatches
        self._num_pairs = num_pairs = schedule.num_stages * m
        # When a product was made, and when it left for and is at the stage of n.
        self._made, self._left, self._there = ([[_NEVER] * num_pairs for _ in Product] for _ in range(3))
        self._there[Product.OUTPUT][:m] = self._there[Product.GRADIENT][-m:] = [0.0] * m  # tokens, and the loss
        # By kind: when each product that it needs is there, and the name of that event less n; what it makes; whether
        # it adds to gradients.
        self._rules = {
            kind: (
                [((self._there if need.stage else self._made)[need.product], need.product * num_pairs) for need in of],
                _MAKES.get(kind),
                kind in ADDS,
            )
            for kind, of in NEEDS.items()
        }
        self._added = [_NEVER] * num_pairs  # when its gradients were
        self._complete: dict[tuple[int, int], float] = {}  # (rank, stage): when a copy's gradients are
        self._waiting: dict[object, int] = {}  # what a rank waits for: product x num_pairs + n, or (rank, stage)
        self._lists = [iter(row) for row in schedule.ranks]
        self._to_run: list[Iterator[Action]] = list(self._lists)  # and before them the action that a rank waits at
        self.runnable = list(range(len(clock.ranks)))

    def run_rank(self, number: int, starts: list[float], ends: list[float]) -> None:
        """Run a rank's list until something is not there yet; then the rank goes on when another has made it."""
        clock, rank, rules = self._clock, self._clock.ranks[number], self._rules
        seconds, m, now = clock.seconds, clock.schedule.num_microbatches, rank.compute
        for action in self._to_run[number]:
            kind, stage, microbatch, _, parts = action
            awaited: object = None
            if kind in seconds or parts:
                start = now
                for of, at, i, _, _ in parts or (action,):
                    n = at * m + i
                    for table, event in rules[of][0]:
                        if table[n] > start:
                            start, awaited = table[n], event + n
                if start != _NEVER:
                    if rank.gathered:
                        start = max([start, *(rank.gathered.get(at, 0.0) for at in stages_needed(action))])
                    now = end = start + (clock.costs.compute(action) if parts else seconds[kind][stage])
                    rank.computed = end
                    for part in parts or (action,):
                        self._leave(number, rank, part, end)
            elif kind in _SENT:
                start, end = self._send(rank, _SENT[kind], stage * m + microbatch, stage)
            elif kind in _RECEIVED:
                taken, n = _RECEIVED[kind], stage * m + microbatch
                start, end, awaited = self._left[taken][n], self._there[taken][n], taken * self._num_pairs + n
            elif kind is _STEP:
                start = max(now, rank.reduced)
                now = end = start + clock.costs.step
                rank.reduced = 0.0
            elif kind is _RELEASE:
                start = end = rank.computed
            elif kind is _GATHER:  # issued when the rank has ended what stands before it
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

    def _leave(self, number: int, rank: _Rank, part: Action, end: float) -> None:
        """A computation ended: its product is made, and its gradients are added."""
        kind, stage, i, _, _ = part
        clock = self._clock
        n = stage * clock.schedule.num_microbatches + i
        _, product, adds = self._rules[kind]
        if product is not None:
            self._made[product][n] = end
            copy_of = clock.schedule.placement.copy_of
            way = clock.ways[copy_of[i] if copy_of else 0][product][stage]
            if way is _LEAVES:
                self._send(rank, product, n, stage)
            elif way is _STAYS:
                self._there[product][n + clock.shift[product]] = end
        if adds:
            self._added[n] = rank.added[stage] = end
            if clock.last_added and clock.last_added.get((number, stage)) == i:
                self._complete[number, stage] = end
                self._wake((number, stage))

    def _send(self, rank: _Rank, product: int, n: int, stage: int) -> tuple[float, float]:
        """A product takes its link: (when it starts, when it has left)."""
        clock = self._clock
        taker = n + clock.shift[product]
        start, free = self._made[product][n], rank.links[product]
        if free > start:
            start = free
        rank.links[product] = left = self._left[product][taker] = start + clock.link_s[product][stage]
        self._there[product][taker] = left + clock.costs.latency
        self._wake(product * self._num_pairs + taker)
        return start, left

    def _reduce(self, rank: _Rank, stage: int, microbatch: int) -> tuple[float, float, object]:
        """Start and end of a reduction, and what it waits for if its gradients are not there yet."""
        clock, awaited = self._clock, None
        if microbatch >= 0:  # after an update of an asynchronous schedule: its own microbatch's
            start = self._added[stage * clock.schedule.num_microbatches + microbatch]
        elif not clock.last_added:
            start = rank.added.get(stage, _NEVER)
        else:  # once a step: the gradients of every copy of the stage must be complete
            copies = [(holder, stage) for holder in set(clock.schedule.placement.replicas(stage))]
            awaited = next((copy for copy in copies if copy not in self._complete), None)
            start = max(self._complete.get(copy, _NEVER) for copy in copies)
        if start == _NEVER:
            return start, start, awaited
        start = max(rank.queue, start)
        rank.queue = rank.reduced = start + clock.reduce_s[stage]
        return start, rank.queue, awaited

    def _wake(self, event: object) -> None:
        """The rank that waits for an event can go on."""
        if event in self._waiting:
            self.runnable.append(self._waiting.pop(event))


def _last_added(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(rank, stage) to the microbatch whose gradients the rank adds last."""
    return {
        (rank, part.stage): part.microbatch
        for rank, row in enumerate(schedule.ranks)
        for action in row
        for part in action.computes()
        if part.kind in ADDS
    }
