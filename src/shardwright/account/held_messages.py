"""How many messages of the pipeline lie in a rank's memory, told for each action of its list.

A message is there from when it is received, or made, until the computation that takes it begins, or until it is sent.
Which ones that are follows from the list alone. So it is told once for all times that the list is replayed, and a
replay passes over what neither borrows nor moves anything.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, TRAVELS
from shardwright.schedule.schedule import Program
from shardwright.sharding.stage_placement import StagePlacement

Message = tuple[Kind, int, int]  # stage and microbatch


@dataclass(frozen=True)
class HeldMessages:
    """How many are there after each action, and as each part of an action that computes begins, when it has taken its
    own. `left` stay when the list is through. From the first send on, one more may still be on its way."""

    after: tuple[int, ...]
    as_begins: dict[int, tuple[int, ...]]
    left: frozenset[Message]
    first_send: int

    def once_sent(self) -> "HeldMessages":
        """Messages where the list follows another one, whose last send may still be on its way."""
        end = self.first_send
        after = (*(number + 1 for number in self.after[:end]), *self.after[end:])
        as_begins = {
            index: tuple(number + 1 for number in numbers) if index < end else numbers
            for index, numbers in self.as_begins.items()
        }
        return replace(self, after=after, as_begins=as_begins, first_send=0)


def held_messages(program: Program, row: tuple[Action, ...], before: frozenset[Message] = frozenset()) -> HeldMessages:
    """Follow the messages of one rank's list, of which some are there `before`."""
    return _held(row, program.recomputed, program.placement, before)


@lru_cache(maxsize=128)  # plans that differ in sizes alone have the same lists
def _held(
    row: tuple[Action, ...], recomputed: frozenset[tuple[int, int]], placement: StagePlacement,
    before: frozenset[Message],
) -> HeldMessages:  # fmt: skip
    here, gives = set(before), _Gives(placement)
    after, as_begins = list[int](), dict[int, tuple[int, ...]]()
    first_send, on_its_way = len(row), 0
    for index, action in enumerate(row):
        kind = action[0]
        if kind in RECV:
            here.add(action[:3])
        elif kind in SEND:
            here.discard(action[:3])
            if not on_its_way:
                first_send, on_its_way = index, 1
        elif parts := action.computes():
            numbers = []
            for part in parts:
                if (taken := _taken(part, recomputed)) is not None:
                    here.discard(taken)
                numbers.append(len(here) + on_its_way)
                if (made := gives(part)) is not None:
                    here.add(made)
            as_begins[index] = tuple(numbers)
        after.append(len(here) + on_its_way)
    return HeldMessages(tuple(after), as_begins, frozenset(here), first_send)


def _taken(part: Action, recomputed: frozenset[tuple[int, int]]) -> Message | None:
    """The message that a computation needs no longer. A forward that is run again leaves its input until then."""
    kind, stage, microbatch = part[:3]
    if kind is Kind.WEIGHT_GRAD or (kind is Kind.FORWARD and (stage, microbatch) in recomputed):
        return None
    is_ahead = kind is Kind.FORWARD or kind is Kind.RECOMPUTE
    return Kind.RECV_FORWARD if is_ahead else Kind.RECV_BACKWARD, stage, microbatch


class _Gives:
    """The message that a computation leaves: what its rank will send, or what the next stage takes on this rank."""

    def __init__(self, placement: StagePlacement) -> None:
        self._placement, self._num_stages = placement, placement.num_stages
        self._is_here: dict[tuple[int, int, int], bool] = {}  # by copy of the stages, product and stage

    def __call__(self, part: Action) -> Message | None:
        kind, stage, microbatch = part[:3]
        product = MAKES.get(kind)
        if product is None:
            return None
        following, (to_send, arrived) = stage + TRAVELS[product], MESSAGES[product]
        if not 0 <= following < self._num_stages:
            return None
        place = self._placement.copy(microbatch), product, stage
        if (is_here := self._is_here.get(place)) is None:
            holders = self._placement.holders[place[0]]
            is_here = self._is_here[place] = holders[following] == holders[stage]
        return (arrived, following, microbatch) if is_here else (to_send, stage, microbatch)
