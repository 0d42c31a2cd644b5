"""The contents of a rank's memory over time: the life of every buffer that a schedule makes.

The same rules give the peak in a table, the curve under a timeline and the limit that a program is checked against, so
these can't disagree.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shardwright.schedule.action import Kind
from shardwright.schedule.message_sizes import Sizes
from shardwright.schedule.schedule import Schedule


class Buffer(StrEnum):
    """The kind of a buffer.

    ACTIVATIONS of a microbatch in a stage: from its F (from its C if it is recomputed) to the end of its B (of its W if
    the backward is split). INPUT of a stage: from F until C begins. MESSAGE: from its receive until the computation
    that takes it begins. PARAMETERS of a stage: from G to L.
    """

    ACTIVATIONS = "activations"
    INPUT = "stage inputs"
    MESSAGE = "messages"
    PARAMETERS = "gathered parameters"


class Life(NamedTuple):
    """One buffer: it is born when the action with index `born` in its rank's list begins.

    It dies with the action `dies`: when that begins if that action takes the buffer over (`taken`), else when it ends.
    """

    buffer: Buffer
    stage: int
    microbatch: int
    born: int
    dies: int
    taken: bool = False


# Constants, because they are looked up for every action.
_FORWARD, _BACKWARD, _WEIGHT_GRAD, _RECOMPUTE = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE


@dataclass(frozen=True)
class LifetimeRule:
    """The actions that begin and end the life of a buffer; both have the same stage and microbatch.

    A forward begins it only for microbatches that are recomputed if `of_recomputed`, else only for the others.
    """

    buffer: Buffer
    begins: tuple[Kind, ...]
    ends: tuple[Kind, ...]
    taken: bool
    of_recomputed: bool = False


RULES = (
    LifetimeRule(Buffer.ACTIVATIONS, (Kind.FORWARD, Kind.RECOMPUTE), (Kind.BACKWARD, Kind.WEIGHT_GRAD), taken=False),
    LifetimeRule(Buffer.INPUT, (Kind.FORWARD,), (Kind.RECOMPUTE,), taken=True, of_recomputed=True),
    LifetimeRule(Buffer.MESSAGE, (Kind.RECV_FORWARD,), (Kind.FORWARD,), taken=True),
    LifetimeRule(Buffer.MESSAGE, (Kind.RECV_BACKWARD,), (Kind.BACKWARD, Kind.INPUT_GRAD), taken=True),
    LifetimeRule(Buffer.PARAMETERS, (Kind.GATHER,), (Kind.RELEASE,), taken=False),
)


def lives(schedule: Schedule, rank: int) -> list[Life]:
    """All buffers of a rank, in the order of their end. A buffer that nothing ends lives to the end of the list. A
    forward-only program keeps nothing for a backward."""
    row, recomputed = schedule.ranks[rank], schedule.recomputed
    # Each rule with its living buffers: (stage, microbatch) to the index of the action that began the life.
    living: list[tuple[LifetimeRule, dict[tuple[int, int], int]]] = [(rule, {}) for rule in RULES]
    ending = {kind: [(rule, births) for rule, births in living if kind in rule.ends] for kind in Kind}
    beginning = {kind: [(rule, births) for rule, births in living if kind in rule.begins] for kind in Kind}
    beginning[Kind.FORWARD] *= schedule.trains
    ended: list[Life] = []
    for index, action in enumerate(row):
        for kind, stage, microbatch, _, _ in action.parts or (action,):
            key = stage, microbatch
            for rule, births in ending[kind]:
                if key in births:
                    ended.append(Life(rule.buffer, stage, microbatch, births.pop(key), dies=index, taken=rule.taken))
            for rule, births in beginning[kind]:
                if kind is not Kind.FORWARD or rule.of_recomputed == (key in recomputed):
                    births[key] = index
    last = len(row) - 1
    return ended + [Life(rule.buffer, *key, born, last) for rule, births in living for key, born in births.items()]


def most(buffers: Iterable[Life]) -> tuple[int, int]:
    """(most buffers alive at once, index of the action where that number is reached first)."""
    changes: Counter[int] = Counter()  # by action: the change when it begins, after the action before it has ended
    for life in buffers:
        changes[life.born] += 1
        changes[life.dies + (not life.taken)] -= 1
    largest, largest_index, count = 0, 0, 0
    for index in sorted(changes):
        count += changes[index]
        if count > largest:
            largest, largest_index = count, index
    return largest, largest_index


def peak(schedule: Schedule, buffer: Buffer) -> list[int]:
    """Most buffers of a kind at once, by rank, if each action ends before the next on its rank begins."""
    return [
        most(life for life in lives(schedule, rank) if life.buffer is buffer)[0] for rank in range(schedule.num_ranks)
    ]


def peak_activations(schedule: Schedule) -> list[int]:
    """Most (stage, microbatch) pairs whose activations are alive at once, by rank.

    Divide by the stages of a rank to get microbatches of all its layers. A forward-only program keeps nothing.

    Equal to `peak(schedule, Buffer.ACTIVATIONS)`, but faster: if every microbatch is computed once, the number alive is
    the number of forwards so far less the number of backwards.
    """
    if not schedule.trains:
        return [0] * schedule.num_ranks
    recomputed = schedule.recomputed
    peaks = []
    for row in schedule.ranks:
        most = alive = 0
        for action in row:
            ended = 0
            for kind, stage, i, _, _ in action[4] or (action,):
                if kind is _FORWARD:
                    alive += (stage, i) not in recomputed
                elif kind is _WEIGHT_GRAD or kind is _BACKWARD:
                    ended += 1
                elif kind is _RECOMPUTE:
                    alive += 1
            if alive > most:
                most = alive
            alive -= ended
        peaks.append(most)
    return peaks


def num_bytes(buffer: Buffer, stage: int, sizes: Sizes | None) -> int | None:
    """The size of a buffer in bytes; None if unknown."""
    if sizes is None:
        return None
    match buffer:
        case Buffer.ACTIVATIONS:
            return sizes.activations[stage] if sizes.activations else None
        case Buffer.INPUT:
            return sizes.stage_input(stage)
        case Buffer.MESSAGE:
            return sizes.message
        case Buffer.PARAMETERS:
            return sizes.gather[stage]
