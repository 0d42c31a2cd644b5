"""From compute actions to a program: every send and receive, gradient reduction and the optimizer step.

Deadlock-free by construction. The schedule is played forward in rounds; whenever a compute action produces what
another rank needs, the send is appended to the one list and the receive to the other *at that moment*. So all
messages have one global order, and each rank's list is that order restricted to its own. Even if every send
blocked until its receive is reached, the first message not yet passed could always pass: no cycle of waiting ranks
can exist.
"""

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Program, Schedule


def lower(schedule: Schedule) -> Program:
    """The program of a schedule. ValueError if its order of compute actions can't be carried out."""
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    position = [0] * schedule.num_ranks
    arrived: set[tuple[Kind, int, int]] = set()  # (F or B, stage, microbatch) whose input is on its rank
    done: set[tuple[Kind, int, int]] = set()
    while any(position[rank] < len(row) for rank, row in enumerate(schedule.ranks)):
        ready = [
            rank
            for rank, row in enumerate(schedule.ranks)
            if position[rank] < len(row)
            and all(_can_run(part, schedule, arrived, done) for part in row[position[rank]].computes())
        ]
        if not ready:
            raise ValueError(_stuck(schedule, position))
        messages = []
        for rank in ready:
            action = schedule.ranks[rank][position[rank]]
            position[rank] += 1
            rows[rank].append(action)
            for part in action.computes():
                done.add((part.kind, part.stage, part.microbatch))
                messages += _products(part, schedule)
        # What this round produced travels before the next round begins.
        for sender, send, receiver, recv in messages:
            arrived.add((_consumer(recv.kind), recv.stage, recv.microbatch))
            if sender != receiver:
                rows[sender].append(send)
                rows[receiver].append(recv)
    trains = any(part.kind is not Kind.FORWARD for row in schedule.ranks for a in row for part in a.computes())
    if trains:
        for rank, row in enumerate(rows):
            _add_reductions(row, schedule.stages_of(rank))
            row.append(Action(Kind.STEP))
    return Program(schedule.name, schedule.num_microbatches, schedule.rank_of, tuple(map(tuple, rows)))


def _can_run(
    action: Action, schedule: Schedule, arrived: set[tuple[Kind, int, int]], done: set[tuple[Kind, int, int]]
) -> bool:
    stage, i = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return stage == 0 or (Kind.FORWARD, stage, i) in arrived
    if action.kind is Kind.WEIGHT_GRAD:
        return (Kind.INPUT_GRAD, stage, i) in done
    last = stage == schedule.num_stages - 1
    return (Kind.FORWARD, stage, i) in done and (last or (Kind.BACKWARD, stage, i) in arrived)


def _products(action: Action, schedule: Schedule) -> list[tuple[int, Action, int, Action]]:
    """What a compute action sends on: (sender, its send, receiver, its receive)."""
    stage, i = action.stage, action.microbatch
    here = schedule.rank_of[stage]
    if action.kind is Kind.FORWARD and stage + 1 < schedule.num_stages:
        there = schedule.rank_of[stage + 1]
        send = Action(Kind.SEND_FORWARD, stage, i, peer=there)
        return [(here, send, there, Action(Kind.RECV_FORWARD, stage + 1, i, peer=here))]
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage > 0:
        there = schedule.rank_of[stage - 1]
        send = Action(Kind.SEND_BACKWARD, stage, i, peer=there)
        return [(here, send, there, Action(Kind.RECV_BACKWARD, stage - 1, i, peer=here))]
    return []


def _consumer(recv: Kind) -> Kind:
    return Kind.FORWARD if recv is Kind.RECV_FORWARD else Kind.BACKWARD


def _add_reductions(row: list[Action], stages: tuple[int, ...]) -> None:
    """Reduce a stage's gradients right after the last action that adds to them."""
    for stage in stages:
        adds = [
            index
            for index, action in enumerate(row)
            if any(p.stage == stage and p.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD) for p in action.computes())
        ]
        row.insert(adds[-1] + 1, Action(Kind.REDUCE, stage))


def _stuck(schedule: Schedule, position: list[int]) -> str:
    waits = [
        f"rank {rank} can't run {row[position[rank]]} (its action {position[rank]})"
        for rank, row in enumerate(schedule.ranks)
        if position[rank] < len(row)
    ]
    return f"schedule {schedule.name} stops for ever: " + "; ".join(waits) + "; an input of each never comes"
