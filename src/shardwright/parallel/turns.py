"""Passes that run side by side on one rank compute in turn: one goes on where the other begins to wait.

The threads of a rank are those of its cores. Two passes that compute at once would share them slice by slice: both
would come late to their next collective, and meanwhile the link would carry nothing. It also keeps the ranks of a
group in step, for they hand over at the same places.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Who computes. A thread that takes no turns, as where only one pass runs, is never held up."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._mine = threading.local()

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Compute, once nobody else does, and until the end or a `waiting` within."""
        with self._turn:
            self._mine.has_turn = True
            try:
                yield
            finally:
                self._mine.has_turn = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks: whoever wants to may compute meanwhile. Every wait has to be in here."""
        if not getattr(self._mine, "has_turn", False):
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
