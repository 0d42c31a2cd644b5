"""A forward and a backward pass side by side on one rank: who computes, and which pass a thread is in.

They compute in turn: one goes on where the other begins to wait. The threads of a rank are those of its cores. Two
passes that compute at once would share them slice by slice: both would come late to their next collective, and
meanwhile the link would carry nothing. It also keeps the ranks of a group in step, for they hand over at the same
places.

On CUDA a wait does not hold up the host: it only tells a stream to wait. There the passes issue their work in turn,
each to a stream of its own (parallel/pipeline/stage_streams.py), and the device computes of both what is ready.

Each pass has communicators of its own (collectives.py). On one, the ranks of a group would have to issue the
collectives of both passes in a common order, and two threads have none. Which pass a collective belongs to is what its
thread runs, and nothing that a layer says: so a forward that is computed again within a backward uses the backward's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Pass = Literal["forward", "backward"]
_OTHER: dict[Pass, Pass] = {"forward": "backward", "backward": "forward"}


class Turns:
    """Who computes, where waiting blocks the host. A thread that takes no turns, as where only one pass runs, is never
    held up."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._mine = threading.local()

    @property
    def beside(self) -> Pass | None:
        """The pass that this thread runs beside another one; None where only one runs."""
        running: Pass | None = getattr(self._mine, "running", None)
        return running

    @contextmanager
    def side_by_side(self, begins: Pass) -> Iterator[None]:
        """While two passes run, each on a thread of its own that takes turns; `begins` computes first."""
        yield

    @contextmanager
    def taking(self, running: Pass) -> Iterator[None]:
        """Compute a pass, once nobody else does, and until the end or a `waiting` within."""
        with self.apart(running):
            yield

    @contextmanager
    def apart(self, running: Pass) -> Iterator[None]:
        """Compute a pass of two that a dry run computes one after the other, on the pass's own communicators."""
        with self._turn:
            self._mine.running = running
            try:
                yield
            finally:
                self._mine.running = None

    @contextmanager
    def waiting(self, keeps_turn: bool = False) -> Iterator[None]:
        """Wait for other ranks, as every wait has to be: whoever wants to may compute meanwhile, unless the turn is
        kept."""
        if self.beside is None or keeps_turn:
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class IssueTurns(Turns):
    """Who issues work to the device, where waiting does not block the host: whoever waits hands over, and goes on once
    the other waits or ends. So all ranks of a group issue the collectives of both passes in one order, as NCCL wants
    them that share a device."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition(self._turn)
        self._going: set[Pass] = set()
        self._next: Pass = "forward"

    @contextmanager
    def side_by_side(self, begins: Pass) -> Iterator[None]:
        with self._changed:
            self._going, self._next = set(_OTHER), begins
        yield

    @contextmanager
    def taking(self, running: Pass) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._next == running)
            self._mine.running = running
            try:
                yield
            finally:
                self._mine.running = None
                self._going.remove(running)
                self._hand_over(running)

    @contextmanager
    def waiting(self, keeps_turn: bool = False) -> Iterator[None]:
        yield  # the stream waits, and the host goes on at once: nobody is held up, and no turn need be kept
        running = self.beside
        if running is not None and _OTHER[running] in self._going:
            self._hand_over(running)
            self._changed.wait_for(lambda: self._next == running)

    def _hand_over(self, running: Pass) -> None:
        self._next = _OTHER[running]
        self._changed.notify_all()
