"""A forward and a backward pass side by side on one rank: which pass computes, and which pass a thread runs.

The passes compute in turn: one continues when the other begins to wait. Two passes that compute at the same time would
share the rank's cores: both would reach their next collective late, and meanwhile the link would be idle. Turns also
keep the ranks of a group in step, because all of them hand over at the same places.

On CUDA a wait does not block the host: it only tells a stream to wait. There the passes issue their work in turn, each
to a stream of its own (parallel/pipeline/stage_streams.py), and the device computes the work of either that is ready.

Each pass has communicators of its own (collectives.py). On a shared one, the ranks of a group would have to issue the
collectives of both passes in a common order, which two threads do not have. The thread decides to which pass a
collective belongs, not the layer: so a forward that is recomputed within a backward uses the backward's communicators.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Pass = Literal["forward", "backward"]
_OTHER: dict[Pass, Pass] = {"forward": "backward", "backward": "forward"}


class Turns:
    """The turns of two passes if waiting blocks the host: only the pass with the turn computes. A thread that takes no
    turns, such as when only one pass runs, is never blocked."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._thread_state = threading.local()

    @property
    def beside(self) -> Pass | None:
        """The pass that this thread runs while another pass runs side by side; None if only one runs."""
        running: Pass | None = getattr(self._thread_state, "running", None)
        return running

    @contextmanager
    def side_by_side(self, first: Pass) -> Iterator[None]:
        """A block in which two passes run, each on a thread of its own that takes turns; `first` begins to compute."""
        yield

    @contextmanager
    def taking(self, running: Pass) -> Iterator[None]:
        """Take the turn for a pass once the other pass has given it up, and keep it until the end of the block or a
        `waiting` within it."""
        with self.apart(running):
            yield

    @contextmanager
    def apart(self, running: Pass) -> Iterator[None]:
        """Compute one of two passes that a dry run computes one after the other, on the pass's own communicators."""
        with self._turn:
            self._thread_state.running = running
            try:
                yield
            finally:
                self._thread_state.running = None

    @contextmanager
    def waiting(self, keeps_turn: bool = False) -> Iterator[None]:
        """A block around every wait for other ranks: the other pass may compute meanwhile, unless this one keeps its
        turn."""
        if self.beside is None or keeps_turn:
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class IssueTurns(Turns):
    """The turns of two passes if waiting does not block the host: only the pass with the turn issues work to the
    device. A pass that waits hands the turn over, and continues once the other one waits or ends. So all ranks of a
    group issue the collectives of both passes in one order, as NCCL requires on a shared device."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition(self._turn)
        self._going: set[Pass] = set()
        self._next: Pass = "forward"

    @contextmanager
    def side_by_side(self, first: Pass) -> Iterator[None]:
        with self._changed:
            self._going, self._next = set(_OTHER), first
        yield

    @contextmanager
    def taking(self, running: Pass) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._next == running)
            self._thread_state.running = running
            try:
                yield
            finally:
                self._thread_state.running = None
                self._going.remove(running)
                self._hand_over(running)

    @contextmanager
    def waiting(self, keeps_turn: bool = False) -> Iterator[None]:
        yield  # the stream waits, and the host continues at once: no pass is blocked, so `keeps_turn` has no effect
        running = self.beside
        if running is not None and _OTHER[running] in self._going:
            self._hand_over(running)
            self._changed.wait_for(lambda: self._next == running)

    def _hand_over(self, running: Pass) -> None:
        self._next = _OTHER[running]
        self._changed.notify_all()
