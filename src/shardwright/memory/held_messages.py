"""The number of pipeline messages in a rank's memory, for each action of its list.

A message is in memory from its receipt, or its computation, until the computation that takes it begins, or until it is
sent. This depends only on the list. So it is computed once for all replays of the list, and a replay skips actions
that neither borrow nor communicate.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, TRAVELS
from shardwright.schedule.schedule import Program
from shardwright.sharding.stage_placement import StagePlacement

Message = tuple[Kind, int, int]  # (kind, stage, microbatch)


@dataclass(frozen=True)
class HeldMessages:
    """The number of messages `after` each action, and when each part of a computing action has taken its own and begins
    (`as_begins`). `left` are those in memory after the list. From the first send on, one sent message more may still be
    in transfer, and is counted."""

    after: tuple[int, ...]
    as_begins: dict[int, tuple[int, ...]]
    left: frozenset[Message]
    first_send: int

    def once_sent(self) -> "HeldMessages":
        """The messages if the list follows another one, whose last send may still be in transfer."""
        end = self.first_send
        after = (*(number + 1 for number in self.after[:end]), *self.after[end:])
        as_begins = {
            index: tuple(number + 1 for number in numbers) if index < end else numbers
            for index, numbers in self.as_begins.items()
        }
        return replace(self, after=after, as_begins=as_begins, first_send=0)


def held_messages(program: Program, row: tuple[Action, ...], before: frozenset[Message] = frozenset()) -> HeldMessages:
    """The messages of one rank's list. Messages of `before` are in memory at its start."""
    return _held(row, program.recomputed, program.placement, before)


@lru_cache(maxsize=128)  # plans that differ only in sizes have the same lists
def _held(
    row: tuple[Action, ...],
    recomputed: frozenset[tuple[int, int]],
    placement: StagePlacement,
    before: frozenset[Message],
) -> HeldMessages:
    present, gives = set(before), _Gives(placement)
    after, as_begins = list[int](), dict[int, tuple[int, ...]]()
    first_send, on_its_way = len(row), 0
    for index, action in enumerate(row):
        kind = action[0]
        if kind in RECV:
            present.add(action[:3])
        elif kind in SEND:
            present.discard(action[:3])
            if not on_its_way:
                first_send, on_its_way = index, 1
        elif parts := action.computes():
            numbers = []
            for part in parts:
                if (input_message := _taken(part, recomputed)) is not None:
                    present.discard(input_message)
                numbers.append(len(present) + on_its_way)
                if (new_message := gives(part)) is not None:
                    present.add(new_message)
            as_begins[index] = tuple(numbers)
        after.append(len(present) + on_its_way)
    return HeldMessages(tuple(after), as_begins, frozenset(present), first_send)


def _taken(part: Action, recomputed: frozenset[tuple[int, int]]) -> Message | None:
    """The message that a computation takes. A forward that will be recomputed keeps its input until then."""
    kind, stage, microbatch = part[:3]
    if kind is Kind.WEIGHT_GRAD or (kind is Kind.FORWARD and (stage, microbatch) in recomputed):
        return None
    is_ahead = kind is Kind.FORWARD or kind is Kind.RECOMPUTE
    return Kind.RECV_FORWARD if is_ahead else Kind.RECV_BACKWARD, stage, microbatch


class _Gives:
    """The message that a computation makes: one that its rank will send, or one for the next stage on the same rank."""

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
        key = self._placement.copy(microbatch), product, stage
        if (is_here := self._is_here.get(key)) is None:
            holders = self._placement.holders[key[0]]
            is_here = self._is_here[key] = holders[following] == holders[stage]
        return (arrived, following, microbatch) if is_here else (to_send, stage, microbatch)
