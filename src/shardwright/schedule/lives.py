"""What a rank keeps in memory, from which action to which: the life of every buffer that a schedule makes.

The peak in a table, the curve under a timeline and the limit that a program is checked against are all read off these
lives, so they can't disagree.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from shardwright.schedule.action import RECV, Action, Kind
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


@dataclass(frozen=True, slots=True)
class Life:
    """One buffer: born when the action with index `born` in its rank's list begins.

    It dies at action `dies`: at its begin if that takes the buffer over (`taken`), else at its end.
    """

    buffer: Buffer
    stage: int
    microbatch: int
    born: int
    dies: int
    taken: bool = False


def lives(schedule: Schedule, rank: int) -> list[Life]:
    """All buffers of a rank, in the order of their end. What is never let go lives to the end of the list."""
    row = schedule.ranks[rank]
    open_since: dict[tuple[Buffer, bool, int, int], int] = {}
    ended: list[Life] = []

    def end(buffer: Buffer, action: Action, index: int, backward: bool = False, taken: bool = False) -> None:
        key = buffer, backward, action.stage, action.microbatch
        if key in open_since:
            ended.append(Life(buffer, action.stage, action.microbatch, open_since.pop(key), index, taken))

    for index, action in enumerate(row):
        stage, i = action.stage, action.microbatch
        if action.kind in RECV:
            open_since[Buffer.MESSAGE, action.kind is Kind.RECV_BACKWARD, stage, i] = index
        elif action.kind is Kind.GATHER:
            open_since[Buffer.PARAMETERS, False, stage, i] = index
        elif action.kind is Kind.RELEASE:
            end(Buffer.PARAMETERS, action, index)
        for part in action.computes():
            key = part.stage, part.microbatch
            if part.kind is Kind.FORWARD:
                end(Buffer.MESSAGE, part, index, taken=True)
                if schedule.trains:
                    kept = Buffer.INPUT if key in schedule.recomputed else Buffer.ACTIVATIONS
                    open_since[kept, False, *key] = index
            elif part.kind is Kind.RECOMPUTE:
                end(Buffer.INPUT, part, index, taken=True)
                open_since[Buffer.ACTIVATIONS, False, *key] = index
            elif part.kind is not Kind.WEIGHT_GRAD:
                end(Buffer.MESSAGE, part, index, backward=True, taken=True)
            if part.kind is Kind.WEIGHT_GRAD or (part.kind is Kind.BACKWARD and key not in schedule.split_backwards):
                end(Buffer.ACTIVATIONS, part, index)
    last = len(row) - 1
    return ended + [Life(buffer, stage, i, born, last) for (buffer, _, stage, i), born in open_since.items()]


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
    """
    return peak(schedule, Buffer.ACTIVATIONS)


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
