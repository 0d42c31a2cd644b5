"""A writer of one rank's list, so that a generator reads like its paper's figure.

`row.write("F1 I1 W1", times=3)` appends three times a forward, an input gradient and a weight gradient of the
rank's second chunk. The text has no microbatches: a forward or a backward takes the next microbatch of its chunk, and a
weight gradient takes the one that has waited longest. An action without a microbatch is left out. So a figure drawn for
many microbatches is also right for few, because no microbatch needs a later one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from shardwright.schedule.action import Action, Kind, action_of

_Take = Callable[[], Action | None]  # the next action of a kind on a chunk; None if no microbatch is left


class Row:
    """The list of a rank that holds `stages`, one per chunk; chunk c computes the microbatches `microbatches[c]`."""

    def __init__(self, stages: Sequence[int], microbatches: Sequence[range]) -> None:
        self._stages = tuple(stages)
        self._forwards = [iter(numbers) for numbers in microbatches]  # by chunk: the remaining microbatches
        self._backwards = [iter(numbers) for numbers in microbatches]
        self._deferred = deque[Action]()  # weight gradients whose input gradient has run, oldest first
        self._actions: list[Action] = []
        self._takes: dict[str, _Take] = {}

    def actions(self) -> tuple[Action, ...]:
        """The actions written so far."""
        return tuple(self._actions)

    def write(self, tokens: str, times: int = 1) -> None:
        """Append actions, each a kind's letter and a chunk: "F0", or "F0+B1" for a pair that runs as one.

        "W" without a chunk is the weight gradient that has waited longest, of any chunk.
        """
        actions, takes = self._actions, list(map(self._take, tokens.split()))
        for _ in range(times):
            num_before = len(actions)
            for take in takes:
                if action := take():
                    actions.append(action)
            if len(actions) == num_before:
                break  # no microbatch is left for these tokens, so further repetitions would add nothing either

    def _take(self, token: str) -> _Take:
        """The function that takes the next action of a token. Lists have a million actions, so each is chosen once."""
        if token not in self._takes:
            first, _, second = token.partition("+")
            self._takes[token] = (
                partial(_pair_of, self._take(first), self._take(second))
                if second
                else self._new_take(Kind(token[0]), token[1:])
            )
        return self._takes[token]

    def _new_take(self, kind: Kind, chunk: str) -> _Take:
        if not chunk:
            return self._take_oldest
        stage = self._stages[int(chunk)]
        if kind is Kind.WEIGHT_GRAD:
            return partial(self._take_deferred, stage)
        if kind is Kind.INPUT_GRAD:
            return partial(self._take_input_grad, stage, self._backwards[int(chunk)])
        return partial(_next_of, kind, stage, (self._forwards if kind is Kind.FORWARD else self._backwards)[int(chunk)])

    def _take_oldest(self) -> Action | None:
        return self._deferred.popleft() if self._deferred else None

    def _take_deferred(self, stage: int) -> Action | None:
        deferred = self._deferred
        if deferred and deferred[0].stage == stage:
            return deferred.popleft()
        for waiting in deferred:
            if waiting.stage == stage:
                deferred.remove(waiting)
                return waiting
        return None

    def _take_input_grad(self, stage: int, remaining: Iterator[int]) -> Action | None:
        if (microbatch := next(remaining, None)) is None:
            return None
        self._deferred.append(action_of((Kind.WEIGHT_GRAD, stage, microbatch, -1, ())))
        return action_of((Kind.INPUT_GRAD, stage, microbatch, -1, ()))


def _next_of(kind: Kind, stage: int, remaining: Iterator[int]) -> Action | None:
    """The action of the next microbatch; None if none is left."""
    if (microbatch := next(remaining, None)) is None:
        return None
    return action_of((kind, stage, microbatch, -1, ()))


def _pair_of(take: _Take, take_other: _Take) -> Action | None:
    """The next actions of two as a pair; one alone if nothing is left for the other."""
    first, second = take(), take_other()
    if first and second:
        return action_of((Kind.OVERLAP, -1, -1, -1, (first, second)))
    return first or second
