"""A writer of one rank's list, so that a generator reads like its paper's figure.

`row.write("F1 I1 W1", times=3)` appends three times a forward, an input gradient and a weight gradient of the
rank's second chunk. The text has no microbatches: a forward or a backward takes the next microbatch of its chunk, and a
weight gradient takes the one that has waited longest. An action without a microbatch is left out. So a figure drawn for
many microbatches is also right for few, because no microbatch needs a later one.
"""

from collections import deque
from collections.abc import Sequence

from shardwright.schedule.action import Action, Kind

_ANY = -1  # any chunk
_FORWARD, _INPUT_GRAD, _WEIGHT_GRAD = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # looked up for every action


class Row:
    """The list of a rank that holds `stages`, one per chunk; chunk c computes the microbatches `microbatches[c]`."""

    def __init__(self, stages: Sequence[int], microbatches: Sequence[range]) -> None:
        self._stages = tuple(stages)
        self._forwards = [iter(numbers) for numbers in microbatches]  # by chunk: the remaining microbatches
        self._backwards = [iter(numbers) for numbers in microbatches]
        self._deferred = deque[Action]()  # weight gradients whose input gradient has run, oldest first
        self._actions: list[Action] = []

    def actions(self) -> tuple[Action, ...]:
        """The actions written so far."""
        return tuple(self._actions)

    def write(self, tokens: str, times: int = 1) -> None:
        """Append actions, each a kind's letter and a chunk: "F0", or "F0+B1" for a pair that runs as one.

        "W" without a chunk is the weight gradient that has waited longest, of any chunk.
        """
        parsed = [
            [(Kind(text[0]), int(text[1:]) if text[1:] else _ANY) for text in token.split("+")]
            for token in tokens.split()
        ]
        for _ in range(times):
            num_before = len(self._actions)
            for token in parsed:
                if len(token) == 1:
                    if action := self._next(*token[0]):
                        self._actions.append(action)
                    continue
                parts = [part for kind, chunk in token if (part := self._next(kind, chunk))]
                self._actions += parts if len(parts) < 2 else [Action(Kind.OVERLAP, parts=tuple(parts))]
            if len(self._actions) == num_before:
                break  # no microbatch is left for these tokens, so further repetitions would add nothing either

    def _next(self, kind: Kind, chunk: int) -> Action | None:
        """The next action of a kind on a chunk; None if no microbatch is left."""
        if kind is _WEIGHT_GRAD:
            deferred = self._deferred
            if deferred and (chunk == _ANY or deferred[0].stage == self._stages[chunk]):
                return deferred.popleft()
            for waiting in deferred:
                if waiting.stage == self._stages[chunk]:
                    deferred.remove(waiting)
                    return waiting
            return None
        remaining = (self._forwards if kind is _FORWARD else self._backwards)[chunk]
        if (microbatch := next(remaining, None)) is None:
            return None
        stage = self._stages[chunk]
        if kind is _INPUT_GRAD:
            self._deferred.append(Action(_WEIGHT_GRAD, stage, microbatch))
        return Action(kind, stage, microbatch)
