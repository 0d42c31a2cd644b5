"""The states that other ranks publish in the rendezvous store, and whether they are silent.

A rank is silent if its state stays the same for some seconds of the clock of the rank that reads it: clocks of machines
may differ, so that the time in a state says nothing of its age.
"""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

State = dict[str, Any]  # "doing", "waits", "at": when it was published by the clock of its rank; "left" at the end


class HeardRanks:
    """The last states of other ranks. A rank that is alive publishes one every `interval_s` seconds."""

    def __init__(self, store: dist.Store, interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s
        self._silence_s = 1.0 + 1.5 * interval_s
        # By rank: when it published by its own clock, and when this rank first saw that by the clock here.
        self._heard: dict[int, tuple[float, float]] = {}

    def publish(self, rank: int, state: State) -> None:
        """Publish this rank's state."""
        self._store.set(f"watch/{rank}", json.dumps(state))

    def state(self, rank: int) -> State:
        """The last state that a rank published; empty if there is none."""
        key = f"watch/{rank}"
        state: State = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        published_s = state.get("at", -1.0)
        if rank not in self._heard or self._heard[rank][0] != published_s:
            self._heard[rank] = published_s, time.monotonic()
        return state

    def is_silent(self, rank: int) -> bool:
        """True if a rank whose state was read before has published nothing for some seconds since."""
        return time.monotonic() - self._heard[rank][1] >= self._silence_s

    def silent_s(self, rank: int) -> float:
        """Seconds without a new state: those seen here, or more by the clock of that rank."""
        published_s, seen_s = self._heard[rank]
        return max(time.monotonic() - seen_s, time.time() - published_s)

    def listen(self, ranks: Iterable[int], meanwhile: Callable[[], None] = lambda: None) -> dict[int, State]:
        """The states of ranks after the time in which all that are alive publish anew. Calls `meanwhile` again and
        again."""
        ranks = list(ranks)
        states = {rank: self.state(rank) for rank in ranks}
        until_s = time.monotonic() + self._silence_s
        while time.monotonic() < until_s:
            meanwhile()
            time.sleep(self._interval_s / 4)
            states = {rank: self.state(rank) for rank in ranks}
        return states
