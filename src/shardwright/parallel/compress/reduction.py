"""A reduction that consists of several collectives, one after the other."""

from collections.abc import Iterator

from shardwright.parallel.comm.collectives import Pending


class Reduction:
    """A reduction under way; it is used like a `Pending` collective.

    `steps` yields each collective when the next computation needs its result. Collectives before the first yield are
    started at once, later ones by `advance` and `wait`. So ranks must start, advance and await their reductions on one
    axis in the same order. If all of them are advanced before the first one is awaited, their collectives overlap.
    """

    def __init__(self, steps: Iterator[Pending]) -> None:
        self._steps = steps
        self._pending = next(steps, None)

    def is_over(self) -> bool:
        """True if nothing is left to do or to wait for. Does not block."""
        return self._pending is None

    def advance(self) -> None:
        """Wait for the collective under way, compute with its result, and start the next one."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = next(self._steps, None)

    def wait(self) -> None:
        """Block until the result may be used."""
        while self._pending is not None:
            self.advance()
