"""From compute actions to a program: every send and receive, gradient reduction and the optimizer step.

The program is free of deadlocks by construction. The schedule is played forward in rounds; whenever a compute action
makes a product that another rank needs, the send is appended to the list of the one rank and the receive to the list
of the other *at that moment*. So all messages have one global order, and each rank's list has its own messages in that
order. Even if every send blocks until its receive is reached, the first message that has not passed can always pass:
no cycle of waiting ranks can exist.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import itemgetter

from shardwright.config.base import PlanError
from shardwright.config.phrase import each, say
from shardwright.schedule.action import ADDS, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, TRAVELS, Product
from shardwright.schedule.schedule import Order, Program, Schedule

_NEVER = "never"
Event = int | str  # the name of an arrival

# Products as plain integers, because they index lists for every action.
_MAKES = {kind: int(product) for kind, product in MAKES.items()}
_MESSAGES, _TRAVELS = [MESSAGES[product] for product in Product], [TRAVELS[product] for product in Product]


def lower(schedule: Schedule, ranks: Collection[int] | None = None) -> Program:
    """The program of a schedule; with the lists of some `ranks` alone, and empty ones for the others, if these are
    given. ValueError if its order of compute actions can't be carried out."""
    asked = frozenset(range(schedule.num_ranks) if ranks is None else ranks)
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    position = [0] * schedule.num_ranks
    products, holders, copy_of = _Products(schedule), schedule.placement.holders, schedule.placement.copy_of
    waiting: dict[Event, int] = {}  # event to the rank that waits for it
    ready = [rank for rank, row in enumerate(schedule.ranks) if row]
    while ready:
        made, next_ready = list[tuple[int, int, int]](), list[int]()
        for rank in sorted(ready):
            row, index = schedule.ranks[rank], position[rank]
            action = row[index]
            missing = products.run(action[4] or (action,), made)
            if missing is not None:
                waiting[missing] = rank
                continue
            if rank in asked:
                rows[rank].append(action)
            position[rank] = index + 1
            if index + 1 < len(row):
                next_ready.append(rank)
        # The products of this round travel before the next round begins.
        for product, stage, i in made:
            event = products.arrive(product, stage, i)
            if event in waiting:
                next_ready.append(waiting.pop(event))
            of_stage = holders[copy_of[i]] if copy_of else holders[0]
            sender, receiver = of_stage[stage], of_stage[stage + _TRAVELS[product]]
            if sender != receiver:
                send, receive = _MESSAGES[product]
                if sender in asked:
                    rows[sender].append(Action(send, stage, i, receiver))
                if receiver in asked:
                    rows[receiver].append(Action(receive, stage + _TRAVELS[product], i, sender))
        ready = next_ready
    if any(index < len(row) for index, row in zip(position, schedule.ranks, strict=True)):
        raise PlanError(say("schedule {schedule}", schedule=schedule.name), [_deadlock_message(schedule, position)])
    completed = _with_step(schedule, rows)
    lists = tuple(row if rank in asked else () for rank, row in enumerate(completed))
    return Program(schedule.name, schedule.num_microbatches, schedule.placement, lists, schedule.weights)


def with_step(schedule: Schedule) -> Schedule:
    """The schedule with its reductions and the optimizer step, and without messages.

    Its times depend on nothing more, because messages leave in the order in which they are made.
    """
    return replace(schedule, ranks=_with_step(schedule, schedule.ranks))


def _with_step(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Order:
    """The rows of a schedule, with or without its messages, completed with reductions and the optimizer step."""
    updates_itself = any(Kind.STEP in map(itemgetter(0), row) for row in schedule.ranks)  # millions of actions
    if not schedule.trains or updates_itself:
        return tuple(map(tuple, rows))
    num_stages = [len(schedule.placement.stages_of(rank)) for rank in range(schedule.num_ranks)]
    return tuple((*_with_reductions(row, num), Action(Kind.STEP)) for row, num in zip(rows, num_stages, strict=True))


class _Products:
    """The products made and the products arrived, by n = stage x microbatches + microbatch."""

    def __init__(self, schedule: Schedule) -> None:
        self._m, self._num_stages = schedule.num_microbatches, schedule.num_stages
        num_pairs = schedule.num_stages * schedule.num_microbatches
        self._made, self._arrived = ([bytearray(num_pairs) for _ in Product] for _ in range(2))
        self._arrived[Product.OUTPUT][: self._m] = b"\1" * self._m  # tokens
        self._arrived[Product.GRADIENT][-self._m :] = b"\1" * self._m  # the loss
        # By kind: what is there of each product that it needs, and the product if it may come from another rank.
        self._needs = {
            kind: tuple(
                (self._arrived[product], int(product)) if distance else (self._made[product], None)
                for product, distance in needs
            )
            for kind, needs in NEEDS.items()
        }

    def run(self, parts: tuple[Action, ...], made: list[tuple[int, int, int]]) -> Event | None:
        """Run an action, and add to `made` the products that it makes for other stages: (product, its own stage,
        microbatch).

        If a product that it needs is missing, it does not run, and the event of that product is returned; `_NEVER` if
        its own rank should have made it.
        """
        m, needs = self._m, self._needs
        for kind, stage, i, _, _ in parts:
            for available, product in needs.get(kind, ()):
                if not available[stage * m + i]:
                    return _NEVER if product is None else _event(product, stage * m + i)
        for kind, stage, i, _, _ in parts:
            if (makes := _MAKES.get(kind)) is not None:
                self._made[makes][stage * m + i] = 1
                if 0 <= stage + _TRAVELS[makes] < self._num_stages:
                    made.append((makes, stage, i))
        return None

    def arrive(self, product: int, stage: int, i: int) -> Event:
        """Record the arrival of a product of a stage. Returns its event."""
        n = (stage + _TRAVELS[product]) * self._m + i
        self._arrived[product][n] = 1
        return _event(product, n)


def _event(product: int, n: int) -> Event:
    """The name of an arrival: n for an output, ~n for a gradient."""
    return ~n if product else n


def _with_reductions(row: Sequence[Action], num_stages: int) -> list[Action]:
    """The row of a rank that holds `num_stages` stages, with the reduction of each stage's gradients right after the
    last action that adds to them. These are near the end, so the row is read from there."""
    last_addition: dict[int, int] = {}  # by stage: the index of the action
    for index in range(len(row) - 1, -1, -1):
        if len(last_addition) == num_stages:
            break
        action = row[index]
        if (kind := action[0]) in ADDS:
            last_addition.setdefault(action[1], index)
        elif kind is Kind.OVERLAP:
            for part in action.parts:
                if part.kind in ADDS:
                    last_addition.setdefault(part.stage, index)
    complete: dict[int, list[int]] = {}  # by index: the stages whose gradients are complete after the action
    for stage, index in sorted(last_addition.items()):
        complete.setdefault(index, []).append(stage)
    rewritten: list[Action] = []
    start = 0
    for index in sorted(complete):
        rewritten += row[start : index + 1]
        rewritten += [Action(Kind.REDUCE, stage) for stage in complete[index]]
        start = index + 1
    return [*rewritten, *row[start:]]


def _deadlock_message(schedule: Schedule, position: list[int]) -> str:
    waits = [
        say(
            "rank {rank} can't run {action} (its action {index})",
            rank=rank,
            action=str(row[position[rank]]),
            index=position[rank],
        )
        for rank, row in enumerate(schedule.ranks)
        if position[rank] < len(row)
    ]
    return say(
        "schedule {name} stops for ever: {waits}; an input of each never comes", name=schedule.name, waits=each(waits)
    )
