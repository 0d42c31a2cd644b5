"""A pen for one rank's list, so that a generator reads like its paper's figure.

`row.write("F1 I1 W1", times=3)` appends three times a forward, an input gradient and a weight gradient of the
rank's second chunk. Microbatches are not written: a forward or a backward takes the next one of its chunk, and a
weight gradient the one that has waited longest. What would be one too many is left out. So a figure drawn for many
microbatches is also right for few, because no microbatch needs a later one.
"""

from collections.abc import Sequence

from shardwright.schedule.action import Action, Kind


class Row:
    """The list of a rank that holds `stages`, one a chunk; chunk c sees the microbatches `microbatches[c]`."""

    def __init__(self, stages: Sequence[int], microbatches: Sequence[range]) -> None:
        self._stages = tuple(stages)
        self._microbatches = tuple(microbatches)
        self._forwards = [0] * len(self._stages)
        self._backwards = [0] * len(self._stages)
        self._deferred: list[Action] = []  # weight gradients whose input gradient has run, oldest first
        self._actions: list[Action] = []

    def actions(self) -> tuple[Action, ...]:
        """What has been written."""
        return tuple(self._actions)

    def write(self, tokens: str, times: int = 1) -> None:
        """Append actions, each a kind's letter and a chunk: "F0", or "F0+B1" for a pair that runs as one.

        "W" without a chunk is the weight gradient that has waited longest, whichever chunk's.
        """
        for _ in range(times):
            for token in tokens.split():
                parts = tuple(part for text in token.split("+") for part in self._next(text[0], text[1:]))
                self._actions += parts if len(parts) < 2 else (Action(Kind.OVERLAP, parts=parts),)

    def _next(self, letter: str, chunk_text: str) -> list[Action]:
        """The next action of a kind on a chunk, or none."""
        if letter == "W":
            stage = self._stages[int(chunk_text)] if chunk_text else -1
            found = [action for action in self._deferred if stage in (action.stage, -1)][:1]
            for action in found:
                self._deferred.remove(action)
            return found
        chunk = int(chunk_text)
        taken, stage = self._forwards if letter == "F" else self._backwards, self._stages[chunk]
        if taken[chunk] == len(self._microbatches[chunk]):
            return []
        microbatch = self._microbatches[chunk][taken[chunk]]
        taken[chunk] += 1
        if letter == "I":
            self._deferred.append(Action(Kind.WEIGHT_GRAD, stage, microbatch))
        return [Action(Kind(letter), stage, microbatch)]
