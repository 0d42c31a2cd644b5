"""What a rank keeps in memory, from which action to which: the life of every buffer that a schedule makes.

The peak in a table, the curve under a timeline and the limit that a program is checked against are all read off these
lives, so they can't disagree.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from shardwright.schedule.action import Kind
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.sizes import Sizes


class Buffer(StrEnum):
    """What is kept.

    ACTIVATIONS of a microbatch in a stage: from its F, or from its C where it is computed again, to the end of B, or
    of W where the backward is split. INPUT of a stage: from F until C begins. MESSAGE: from its receive until the
    computation that takes it begins. PARAMETERS of a stage: from G to L.
    """

    ACTIVATIONS = "activations"
    INPUT = "stage inputs"
    MESSAGE = "messages"
    PARAMETERS = "gathered parameters"


class Life(NamedTuple):
    """One buffer: born when the action with index `born` in its rank's list begins.

    It dies at action `dies`: at its begin if that takes the buffer over (`taken`), else at its end.
    """

    buffer: Buffer
    stage: int
    microbatch: int
    born: int
    dies: int
    taken: bool = False


_Since = dict[tuple[int, int], int]  # by (stage, microbatch): since which action there is a buffer


def lives(schedule: Schedule, rank: int) -> list[Life]:
    """All buffers of a rank, in the order of their end. What is never let go lives to the end of the list."""
    row, trains = schedule.ranks[rank], schedule.trains
    recomputed, split = schedule.recomputed, schedule.split_backwards
    activations, stage_inputs, parameters = _Since(), _Since(), _Since()
    inputs, gradients = _Since(), _Since()  # messages, from the stage before and from the one behind
    ended: list[Life] = []
    index = 0

    def end(buffer: Buffer, since: _Since, key: tuple[int, int], taken: bool = False) -> None:
        if key in since:
            # As Life(...), which would first go through a function of its own.
            ended.append(tuple.__new__(Life, (buffer, *key, since.pop(key), index, taken)))

    for index, action in enumerate(row):
        for kind, stage, microbatch, _, _ in action.parts or (action,):
            key = stage, microbatch
            if kind is Kind.FORWARD:
                end(Buffer.MESSAGE, inputs, key, True)
                if trains:
                    (stage_inputs if key in recomputed else activations)[key] = index
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
                end(Buffer.MESSAGE, gradients, key, True)
                if kind is Kind.BACKWARD and key not in split:
                    end(Buffer.ACTIVATIONS, activations, key)
            elif kind is Kind.WEIGHT_GRAD:
                end(Buffer.ACTIVATIONS, activations, key)
            elif kind is Kind.RECV_FORWARD:
                inputs[key] = index
            elif kind is Kind.RECV_BACKWARD:
                gradients[key] = index
            elif kind is Kind.RECOMPUTE:
                end(Buffer.INPUT, stage_inputs, key, True)
                activations[key] = index
            elif kind is Kind.GATHER:
                parameters[key] = index
            elif kind is Kind.RELEASE:
                end(Buffer.PARAMETERS, parameters, key)
    left = [(Buffer.ACTIVATIONS, activations), (Buffer.INPUT, stage_inputs), (Buffer.PARAMETERS, parameters)]
    left += [(Buffer.MESSAGE, inputs), (Buffer.MESSAGE, gradients)]
    return ended + [Life(buffer, *key, born, len(row) - 1) for buffer, since in left for key, born in since.items()]


def most(buffers: Iterable[Life]) -> tuple[int, int]:
    """How many there are at once, at most, and the index of the action where that is reached first."""
    changes: Counter[int] = Counter()  # when an action begins, and so the one before has ended
    for life in buffers:
        changes[life.born] += 1
        changes[life.dies + (not life.taken)] -= 1
    largest, where, count = 0, 0, 0
    for index in sorted(changes):
        count += changes[index]
        if count > largest:
            largest, where = count, index
    return largest, where


def peak(schedule: Schedule, buffer: Buffer) -> list[int]:
    """Most buffers of a kind at once, by rank, if each action ends before the next on its rank begins."""
    return [
        most(life for life in lives(schedule, rank) if life.buffer is buffer)[0] for rank in range(schedule.num_ranks)
    ]


def peak_activations(schedule: Schedule) -> list[int]:
    """Most (stage, microbatch) pairs whose activations are alive at once, by rank.

    Divide by the stages of a rank to get microbatches of all its layers. A forward-only program keeps nothing.

    The same as `peak` says by the lives of all buffers, in a part of the time: of a program whose every microbatch is
    computed once, the number alive is that of forwards before less that of backwards.
    """
    if not schedule.trains:
        return [0] * schedule.num_ranks
    recomputed, split = schedule.recomputed, schedule.split_backwards
    found = []
    for row in schedule.ranks:
        most = alive = 0
        for action in row:
            ended = 0
            for kind, stage, i, _, _ in action.computes():
                if kind is Kind.FORWARD:
                    alive += (stage, i) not in recomputed
                elif kind is Kind.RECOMPUTE:
                    alive += 1
                elif kind is Kind.WEIGHT_GRAD or (kind is Kind.BACKWARD and (stage, i) not in split):
                    ended += 1
            if alive > most:
                most = alive
            alive -= ended
        found.append(most)
    return found


def num_bytes(life: Life, sizes: Sizes | None) -> int | None:
    """The size of a buffer; None where it is not known."""
    if sizes is None:
        return None
    match life.buffer:
        case Buffer.ACTIVATIONS:
            return sizes.activations[life.stage] if sizes.activations else None
        case Buffer.INPUT:
            return sizes.stage_input(life.stage)
        case Buffer.MESSAGE:
            return sizes.message
        case Buffer.PARAMETERS:
            return sizes.gather[life.stage]
