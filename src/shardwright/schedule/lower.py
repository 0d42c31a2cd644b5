"""From compute actions to a program: every send and receive, gradient reduction and the optimizer step.

Deadlock-free by construction. The schedule is played forward in rounds; whenever a compute action produces what
another rank needs, the send is appended to the one list and the receive to the other *at that moment*. So all
messages have one global order, and each rank's list is that order restricted to its own. Even if every send
blocked until its receive is reached, the first message not yet passed could always pass: no cycle of waiting ranks
can exist.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.schedule.action import ADDS, Action, Kind
from shardwright.schedule.schedule import Order, Program, Schedule

Event = tuple[Kind, int, int]  # (F or B, stage, microbatch): this has its input; or (kind, ...): this has run


def lower(schedule: Schedule) -> Program:
    """The program of a schedule. ValueError if its order of compute actions can't be carried out."""
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    position = [0] * schedule.num_ranks
    arrived: set[Event] = set()
    done: set[Event] = set()
    unfinished = {rank for rank, row in enumerate(schedule.ranks) if row}
    while unfinished:
        ready = [
            rank
            for rank in sorted(unfinished)
            if _can_run(schedule.ranks[rank][position[rank]], schedule, arrived, done)
        ]
        if not ready:
            raise ValueError(_stuck(schedule, position))
        messages = []
        for rank in ready:
            action = schedule.ranks[rank][position[rank]]
            position[rank] += 1
            if position[rank] == len(schedule.ranks[rank]):
                unfinished.discard(rank)
            rows[rank].append(action)
            for part in action.computes():
                done.add((part.kind, part.stage, part.microbatch))
                messages += _products(part, schedule)
        # What this round produced travels before the next round begins.
        for sender, send, receiver, recv in messages:
            consumer = Kind.FORWARD if recv.kind is Kind.RECV_FORWARD else Kind.BACKWARD
            arrived.add((consumer, recv.stage, recv.microbatch))
            if sender != receiver:
                rows[sender].append(send)
                rows[receiver].append(recv)
    ranks = _with_step(schedule, rows)
    return Program(schedule.name, schedule.num_microbatches, schedule.placement, ranks, schedule.weights)


def with_step(schedule: Schedule) -> Schedule:
    """The schedule with its reductions and the optimizer step, and without messages.

    That is all that its times depend on: messages leave in the order in which they are made.
    """
    return replace(schedule, ranks=_with_step(schedule, schedule.ranks))


def _with_step(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Order:
    """Rows of a schedule, with or without its messages, that also reduce and update."""
    updates_itself = any(action.kind is Kind.STEP for row in schedule.ranks for action in row)
    if not schedule.trains or updates_itself:
        return tuple(map(tuple, rows))
    return tuple((*_with_reductions(row), Action(Kind.STEP)) for row in rows)


def _can_run(entry: Action, schedule: Schedule, arrived: set[Event], done: set[Event]) -> bool:
    last = schedule.num_stages - 1
    for action in entry.computes():
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind is Kind.FORWARD:
            ready = stage == 0 or (Kind.FORWARD, stage, i) in arrived
        elif kind is Kind.WEIGHT_GRAD:
            ready = (Kind.INPUT_GRAD, stage, i) in done
        elif kind is Kind.RECOMPUTE:
            ready = (Kind.FORWARD, stage, i) in done
        else:
            ready = (Kind.FORWARD, stage, i) in done and (stage == last or (Kind.BACKWARD, stage, i) in arrived)
        if not ready:
            return False
    return True


def _products(action: Action, schedule: Schedule) -> list[tuple[int, Action, int, Action]]:
    """What a compute action sends on: (sender, its send, receiver, its receive)."""
    stage, i, rank_of = action.stage, action.microbatch, schedule.placement.rank
    here = rank_of(stage, i)
    if action.kind is Kind.FORWARD and stage + 1 < schedule.num_stages:
        there = rank_of(stage + 1, i)
        send = Action(Kind.SEND_FORWARD, stage, i, peer=there)
        return [(here, send, there, Action(Kind.RECV_FORWARD, stage + 1, i, peer=here))]
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage > 0:
        there = rank_of(stage - 1, i)
        send = Action(Kind.SEND_BACKWARD, stage, i, peer=there)
        return [(here, send, there, Action(Kind.RECV_BACKWARD, stage - 1, i, peer=here))]
    return []


def _with_reductions(row: Sequence[Action]) -> list[Action]:
    """Reduce a stage's gradients right after the last action that adds to them."""
    adds_last: dict[int, int] = {}
    for index, action in enumerate(row):
        for part in action.parts or (action,):
            if part.kind in ADDS:
                adds_last[part.stage] = index
    complete: dict[int, list[int]] = {}
    for stage, index in sorted(adds_last.items()):
        complete.setdefault(index, []).append(stage)
    with_them: list[Action] = []
    first = 0
    for index in sorted(complete):
        with_them += row[first : index + 1]
        with_them += [Action(Kind.REDUCE, stage) for stage in complete[index]]
        first = index + 1
    return [*with_them, *row[first:]]


def _stuck(schedule: Schedule, position: list[int]) -> str:
    waits = [
        f"rank {rank} can't run {row[position[rank]]} (its action {position[rank]})"
        for rank, row in enumerate(schedule.ranks)
        if position[rank] < len(row)
    ]
    return f"schedule {schedule.name} stops for ever: " + "; ".join(waits) + "; an input of each never comes"
