"""A forward and a backward pass side by side on one rank: who computes, and which pass a thread is in.

They compute in turn: one goes on where the other begins to wait. The threads of a rank are those of its cores. Two
passes that compute at once would share them slice by slice: both would come late to their next collective, and
meanwhile the link would carry nothing. It also keeps the ranks of a group in step, for they hand over at the same
places.

Each pass has communicators of its own (collectives.py). On one, the ranks of a group would have to issue the
collectives of both passes in a common order, and two threads have none. Which pass a collective belongs to is what its
thread runs, and nothing that a layer says: so a forward that is computed again within a backward uses the backward's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Pass = Literal["forward", "backward"]


class Turns:
    """Who computes. A thread that takes no turns, as where only one pass runs, is never held up."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._mine = threading.local()

    @property
    def beside(self) -> Pass | None:
        """The pass that this thread runs beside another one; None where only one runs."""
        running: Pass | None = getattr(self._mine, "running", None)
        return running

    @contextmanager
    def taking(self, running: Pass) -> Iterator[None]:
        """Compute a pass, once nobody else does, and until the end or a `waiting` within."""
        with self._turn:
            self._mine.running = running
            try:
                yield
            finally:
                self._mine.running = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks: whoever wants to may compute meanwhile. Every wait has to be in here."""
        if self.beside is None:
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
