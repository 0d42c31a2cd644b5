"""The look for plans with state in host memory, beside the search for plans without.

It needs a limit: the time of the best plan without. Any plan without is such a limit, so the look begins with the first
one whose step is simulated, in a forked copy of this process where there is a second core, while this process improves
and judges the others. The limit does not depend on the number of processes, and so neither does what is found.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from shardwright.planner.advice.advice import Advice
from shardwright.planner.search.forked_copies import ForkedCopy, forked_copies, num_processes
from shardwright.planner.search.search_progress import untold


class HostedLook:
    """The best plan with state in host memory of those that cost at most a limit, as the objective counts. `look` takes
    the limit; a copy that works for this process ends with the context."""

    def __init__(self, look: Callable[[float], Advice]) -> None:
        self._look, self._ended_last = look, ExitStack()
        self._most: float | None = None
        self._copies: list[ForkedCopy[float, Advice]] = []

    def __enter__(self) -> "HostedLook":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_last.close()

    def begin(self, most: float) -> None:
        """Begin with a limit; later ones are left out."""
        if self._most is not None:
            return
        self._most = most
        if num_processes() > 1:
            self._copies = self._ended_last.enter_context(forked_copies(self._look, [[most]]))

    def result(self, least_most: float) -> Advice:
        """The result for a limit of `least_most` or more: that with which the look began, if it is no lower."""
        if self._most is None or self._most < least_most:
            self._most, self._copies = least_most, []
        with untold():
            return self._copies[0].result() if self._copies else self._look(self._most)
