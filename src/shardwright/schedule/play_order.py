"""The order in which the actions of all ranks can be timed, and what each of them waits for.

Actions on one resource of a rank run in the order of its list, so what an action waits for does not depend on costs: it
is worked out once for a program, and timing.py then adds up the costs of each plan that has this program. An order is a
list of moments: 0, those at which the resources of the ranks are free when the step begins, and the end of each action
that takes time. A message arrives some latency after the end of its send.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter

from shardwright.config.kept_results import kept_by_identity
from shardwright.config.phrase import say
from shardwright.schedule.action import ADDS, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, RECEIVED, TRAVELS, Product
from shardwright.schedule.lowering.zero3_gathers import stages_needed
from shardwright.schedule.schedule import Program, Schedule

# The kinds whose costs are by stage, in the order of the rows of a table of costs; those of messages, by the border
# that they pass, are the last of them.
ROWS = (*NEEDS, Kind.REDUCE, Kind.GATHER, Kind.SEND_FORWARD)
_UPDATE = -1  # the last cost of a table
_START = 0  # the moment at which everything begins
_MISSING = -1  # the moment of what has not happened yet
_RESOURCES = 3 + len(Product)  # of a rank, whose moments are carried from one step to the next


# An action that takes time: (first, second, is late, cost, further). It starts at the latest of some moments, which are
# `first`, `second` and, as (moment, is late), those of `further`. A late one is the end of a send whose message has to
# arrive. `cost` is its place in the table of costs. Plain tuples, because a program has very many.
Node = tuple[int, int, bool, int, tuple[tuple[int, bool], ...]]
Reader = Callable[[Sequence[float]], tuple[float, ...]]


@dataclass(frozen=True)
class PlayOrder:
    """The actions of a step of a program that take time, in an order in which each follows all that it waits for.

    `begins` and `ends` read the starts and ends of the actions of each rank, and `carried` the `num_carried` moments
    that the next step begins with, from a list that has them by 3 x moment + its kind: the end of a node, the arrival
    of what it sent, its start. `pairs` are the costs of the parts of overlapped pairs, which are behind those by kind
    and stage, and before that of the update.
    """

    nodes: list[Node]
    begins: list[Reader]
    ends: list[Reader]
    carried: Reader
    num_carried: int
    pairs: list[tuple[int, int]]


@partial(kept_by_identity, most=4)  # a page asks for the times of many plans with one program
def play_order(schedule: Schedule) -> PlayOrder:
    """The order of a schedule's step. ValueError if some action can never run.

    In a schedule without messages each message leaves when it is made, as in the program that the schedule is lowered
    to.
    """
    return _Ordering(schedule).ordered()


@dataclass(slots=True)
class _Rank:
    """The moments when a rank's resources are free again, and those that its collectives and its update wait for; and
    where its actions start and end, as 3 x moment + kind of moment."""

    compute: int
    links: list[int]  # by the product that travels on it
    queue: int  # of collectives
    computed: int  # the end of its last computation
    reduced: int = _START  # the end of the last reduction since its last update
    gathered: dict[int, int] = field(default_factory=dict)  # by stage: when its parameters are gathered
    added: dict[int, int] = field(default_factory=dict)  # by stage: the last addition to its gradients
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


_END, _ARRIVAL, _BEGIN = range(3)  # kinds of moments: the end of a node, the arrival of what it sent, its start

# The ways of a product when it is made. Nothing happens: the list has its send, or no stage takes it. It stays: the
# stage that takes it is on the same rank. It leaves: it is sent at once.
_NOTHING, _STAYS, _LEAVES = range(3)
# Constants, because they are looked up for every action.
_STEP, _RELEASE, _GATHER = Kind.STEP, Kind.RELEASE, Kind.GATHER
# Products as plain integers, which index lists.
_MAKES, _RECEIVED = ({kind: int(product) for kind, product in table.items()} for table in (MAKES, RECEIVED))
_SENT = {send: int(product) for product, (send, _) in MESSAGES.items()}


class _Ordering:
    """Lists that are run as far as the inputs of their actions are there, until all have run.

    Tables are by product, and by n = stage x microbatches + microbatch of the computation that makes or takes it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._m = schedule, schedule.num_microbatches
        self._num_pairs = num_pairs = schedule.num_stages * self._m
        self._nodes: list[Node] = []
        self._first_node = 1 + _RESOURCES * len(schedule.ranks)
        self._last = self._first_node - 1  # the last moment that has a number
        self._cost = {kind: number * schedule.num_stages for number, kind in enumerate(ROWS)}  # of its first stage
        self._pairs: dict[tuple[int, int], int] = {}
        self._ranks = []
        for free in range(1, self._first_node, _RESOURCES):
            links = list(range(free + 1, free + 1 + len(Product)))
            self._ranks.append(_Rank(free, links, queue=free + 1 + len(Product), computed=free + 2 + len(Product)))
        # When the stage of n made a product; and when a product for the stage of n was sent. A product of its own rank
        # for a stage is there as soon as it is made, and so are tokens, and the gradient of the loss.
        self._made, self._sent = ([[_MISSING] * num_pairs for _ in Product] for _ in range(2))
        self._sent[Product.OUTPUT][: self._m] = self._sent[Product.GRADIENT][-self._m :] = [_START] * self._m
        # By kind: for each product that it needs, the table of its moments, the number of its event less n, and True if
        # another stage makes it.
        self._needs = {
            kind: [
                (
                    (self._sent if need.stage else self._made)[need.product],
                    need.product * num_pairs,
                    need.stage != 0,
                )
                for need in needs
            ]
            for kind, needs in NEEDS.items()
        }
        # By product: the distance to its taker's n.
        self._shift = [TRAVELS[product] * self._m for product in Product]
        sends = _NOTHING if isinstance(schedule, Program) else _LEAVES
        self._ways = []  # by copy, product and stage
        for row in schedule.placement.holders:
            borders = [_STAYS if rank == next_rank else sends for rank, next_rank in pairwise(row)]
            ways_of_direction = {1: [*borders, _NOTHING], -1: [_NOTHING, *borders]}
            self._ways.append([ways_of_direction[TRAVELS[product]] for product in Product])
        # If two ranks hold a stage, its reduction waits for the last addition on both.
        self._last_added = _last_added(schedule) if schedule.placement.num_copies > 1 else {}
        self._added = [_MISSING] * num_pairs  # when the gradients of n were added
        self._complete: dict[tuple[int, int], int] = {}  # (rank, stage): when a copy's gradients are complete
        self._waiting: dict[object, int] = {}  # event to the rank that waits: product x num_pairs + n, or (rank, stage)
        self._lists = [iter(row) for row in schedule.ranks]
        self._to_run: list[Iterator[Action]] = list(self._lists)  # with the action that a rank waits at put back first
        self._runnable = deque(range(len(schedule.ranks)))  # the rank that waits longest first: it goes further then

    def ordered(self) -> PlayOrder:
        """The order of all actions."""
        while self._runnable:
            self._run_rank(self._runnable.popleft())
        self._check_all_ran()
        carried = []
        for rank in self._ranks:
            carried += [3 * moment for moment in (rank.compute, *rank.links, rank.queue)]
            carried.append(rank.ends[-1] if rank.ends else 3 * _START)
        begins, ends = ([_reader(getattr(rank, name)) for rank in self._ranks] for name in ("begins", "ends"))
        return PlayOrder(self._nodes, begins, ends, _reader(carried), len(carried), list(self._pairs))

    def _check_all_ran(self) -> None:
        waits = [
            say("rank {rank} waits at {action} (its action {index})", rank=rank, action=str(row[index]), index=index)
            for rank, (row, index) in enumerate(
                zip(self._schedule.ranks, (len(rank.ends) for rank in self._ranks), strict=True)
            )
            if index < len(row)
        ]
        if waits:
            raise ValueError(
                say("program {name} stops for ever: {waits}", name=self._schedule.name, waits=tuple(waits))
            )

    def _run_rank(self, number: int) -> None:
        """Run a rank's list until an input is missing; then the rank continues when another rank has made it."""
        rank, m = self._ranks[number], self._m
        begins, ends = rank.begins.append, rank.ends.append
        for action in self._to_run[number]:
            kind, stage, microbatch, _, parts = action
            awaited: object = None
            if kind in NEEDS or parts:
                node, awaited = self._computed(rank, action)
                if node != _MISSING:
                    rank.compute = rank.computed = node
                    for part in parts or (action,):
                        self._finish(number, rank, part, node)
            elif kind in _SENT:
                node = self._send(rank, _SENT[kind], stage * m + microbatch, stage)
            elif kind in _RECEIVED:
                product, n = _RECEIVED[kind], stage * m + microbatch
                if (sent := self._sent[product][n]) > _START:
                    begins(3 * sent + _END)
                    ends(3 * sent + _ARRIVAL)
                    continue
                node, awaited = _MISSING, product * self._num_pairs + n
            elif kind is _STEP:
                node = rank.compute = self._node((rank.compute, rank.reduced, False, _UPDATE, ()))
                rank.reduced = _START
            elif kind is _RELEASE:
                begins(3 * rank.computed + _END)
                ends(3 * rank.computed + _END)
                continue
            elif kind is _GATHER:  # issued when the rank has ended the computation before it
                node = self._node((rank.queue, rank.computed, False, self._cost[kind] + stage, ()))
                rank.queue = rank.gathered[stage] = node
            else:
                node, awaited = self._reduced(rank, stage, microbatch)
            if node == _MISSING:
                self._to_run[number] = chain((action,), self._lists[number])
                if awaited is not None:
                    self._waiting[awaited] = number
                break
            begins(3 * node + _BEGIN)
            ends(3 * node + _END)

    def _node(self, node: Node) -> int:
        self._nodes.append(node)
        self._last += 1
        return self._last

    def _computed(self, rank: _Rank, action: Action) -> tuple[int, object]:
        """The end of a computation; or, if an input is missing, the event that it waits for.

        An input that its own rank computes is there, because the rank computes one action after the other.
        """
        kind, stage, _, _, parts = action
        second, is_late = rank.compute, False
        further: tuple[tuple[int, bool], ...] = ()
        for part_kind, part_stage, i, _, _ in parts or (action,):
            n = part_stage * self._m + i
            for table, event, is_elsewhere in self._needs[part_kind]:
                moment = table[n]
                if moment == _MISSING:
                    return _MISSING, event + n
                if is_elsewhere and moment != _START:
                    further = (*further, (second, is_late)) if is_late else further
                    second, is_late = moment, True
        if rank.gathered:
            gathered = (rank.gathered[needed] for needed in stages_needed(action) if needed in rank.gathered)
            further = (*further, *((moment, False) for moment in gathered))
        cost = self._cost_of_pair(parts) if parts else self._cost[kind] + stage
        return self._node((rank.compute, second, is_late, cost, further)), None

    def _cost_of_pair(self, parts: tuple[Action, ...]) -> int:
        first, second = (self._cost[kind] + stage for kind, stage, *_ in parts)
        return len(ROWS) * self._schedule.num_stages + self._pairs.setdefault((first, second), len(self._pairs))

    def _finish(self, number: int, rank: _Rank, part: Action, end: int) -> None:
        """Note the end of a computation: its product is made, and its gradients are added."""
        kind, stage, i, _, _ = part
        n = stage * self._m + i
        product = _MAKES.get(kind)
        if product is not None:
            self._made[product][n] = end
            copy_of = self._schedule.placement.copy_of
            way = self._ways[copy_of[i] if copy_of else 0][product][stage]
            if way is _LEAVES:
                self._send(rank, product, n, stage)
            elif way is _STAYS:
                self._sent[product][n + self._shift[product]] = _START
        if kind in ADDS:
            self._added[n] = rank.added[stage] = end
            if self._last_added and self._last_added.get((number, stage)) == i:
                self._complete[number, stage] = end
                self._wake((number, stage))

    def _send(self, rank: _Rank, product: int, n: int, stage: int) -> int:
        """Send a product over its link, and return when the link is free again."""
        made, taker = self._made[product][n], n + self._shift[product]
        if made == _MISSING:
            return _MISSING
        border = stage - (self._shift[product] < 0)
        end = self._node((made, rank.links[product], False, self._cost[Kind.SEND_FORWARD] + border, ()))
        rank.links[product] = self._sent[product][taker] = end
        self._wake(product * self._num_pairs + taker)
        return end

    def _reduced(self, rank: _Rank, stage: int, microbatch: int) -> tuple[int, object]:
        """The end of a reduction, or the event that it waits for if its gradients are not complete yet."""
        if microbatch >= 0:  # in an asynchronous schedule: the gradients of one microbatch
            added = [self._added[stage * self._m + microbatch]]
        elif not self._last_added:
            added = [rank.added.get(stage, _MISSING)]
        else:  # once a step: the gradients of every copy of the stage must be complete
            copies = [(holder, stage) for holder in set(self._schedule.placement.replicas(stage))]
            awaited = next((copy for copy in copies if copy not in self._complete), None)
            if awaited is not None:
                return _MISSING, awaited
            added = [self._complete[copy] for copy in copies]
        if _MISSING in added:
            return _MISSING, None
        further = tuple((moment, False) for moment in added[1:])
        cost = self._cost[Kind.REDUCE] + stage
        rank.queue = rank.reduced = self._node((rank.queue, added[0], False, cost, further))
        return rank.queue, None

    def _wake(self, event: object) -> None:
        """Make the rank that waits for an event runnable."""
        if event in self._waiting:
            self._runnable.append(self._waiting.pop(event))


def _reader(numbers: list[int]) -> Reader:
    """A function that reads the moments with these numbers from a list."""
    if len(numbers) > 1:  # of one number an itemgetter is no tuple; many it reads several times as fast
        return itemgetter(*numbers)
    return lambda moments: tuple(moments[number] for number in numbers)


def _last_added(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Map (rank, stage) to the microbatch whose gradients the rank adds last."""
    return {
        (rank, part.stage): part.microbatch
        for rank, row in enumerate(schedule.ranks)
        for action in row
        for part in action.computes()
        if part.kind in ADDS
    }
