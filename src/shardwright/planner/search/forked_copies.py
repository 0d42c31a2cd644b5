"""Forked copies of this process, which work beside it and send back results.

A copy begins with everything that this process knows, so its work needs no arguments and loads nothing anew; memory
that neither changes is shared. Only the main thread on Linux forks: a copy of a thread may inherit locks that nobody
will release. Elsewhere, and with one core, `num_processes` is 1, and the caller does all work itself. So work must be
such that its results do not depend on who does it. Copies record no progress, fork no copies of their own, and end
silently with this process.
"""

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar

from shardwright.config.base import RunError
from shardwright.config.phrase import Phrase, say
from shardwright.config.progress_records import LOGGER
from shardwright.config.units import ending_phrase

if sys.platform == "linux":
    import fcntl

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_PIPE_BYTES = 2**20  # so much waits in a pipe until this process has time for it, if the system allows that
_MOST = 4  # processes: each may need a hundred MiB of its own
_ENDS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


def num_processes() -> int:
    """The number of processes among which work is divided; 1 if this process does not fork."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return 1
    return min(_MOST, len(os.sched_getaffinity(0)))


@contextmanager
def forked_copies(
    work: Callable[[Item], Result], shares: Sequence[Sequence[Item]]
) -> "Iterator[list[ForkedCopy[Item, Result]]]":
    """For each share a forked copy that does the work of its items, one after the other; all end with the context."""
    copies: list[ForkedCopy[Item, Result]] = []
    try:
        for share in shares:
            copies.append(ForkedCopy(work, share))
        yield copies
    finally:
        for copy in copies:
            copy.end()


def shared(items: Sequence[Item], work: Callable[[Item], Result]) -> Generator[tuple[Item, Result | None], None, None]:
    """Yield each item, with the result of its work if a forked copy has done it, or None if the caller is to do it.

    Copies work ahead; they are stopped if the caller closes the iterator early.
    """
    count = min(num_processes(), max(1, len(items)))
    with forked_copies(work, [items[number::count] for number in range(1, count)]) as copies:
        for number, item in enumerate(items):
            yield item, copies[number % count - 1].result() if number % count else None


class ForkedCopy(Generic[Item, Result]):
    """A forked copy of this process that does the work of some items."""

    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> None:
        self._work, self._items, first_pid = work, iter(items), os.getpid()
        read_end, write_end = os.pipe()
        with suppress(OSError):
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # handlers of this process must not run in the copy
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _send_results(work, items, write_end, mask, first_pid)
            os.close(write_end)
            self._pipe = os.fdopen(read_end, "rb")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def result(self) -> Result:
        """The result of the next item. If its work raises an exception, it is done again here, which raises it too.

        RunError if the copy has ended before its time.
        """
        item = next(self._items)
        try:
            is_done, result = pickle.load(self._pipe)
        except (EOFError, pickle.UnpicklingError):
            raise RunError(_end_message(self._wait())) from None
        return result if is_done else self._work(item)

    def results_so_far(self, least: int = 0) -> Iterator[Result]:
        """Yield the results that are there by now, without waiting for others than the first `least`; none of work that
        raised an exception, nor of a copy that has ended before its time."""
        num_read = 0
        with suppress(EOFError, pickle.UnpicklingError):
            while num_read < least or self.has_sent():
                is_done, result = pickle.load(self._pipe)
                num_read += 1
                if is_done:
                    yield result

    def has_sent(self) -> bool:
        """True if there is a result, or a part of it, that was not read yet."""
        os.set_blocking(self._pipe.fileno(), False)
        try:
            return bool(self._pipe.peek(1))
        finally:
            os.set_blocking(self._pipe.fileno(), True)

    def end(self) -> None:
        """End the copy, whatever it is doing."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait()
        self._pipe.close()

    def _wait(self) -> int:
        """The exit status of the copy, or the negative number of the signal that killed it."""
        pid, self._pid = self._pid, 0
        with suppress(ChildProcessError):  # a program may ignore SIGCHLD: then nothing is left to wait for
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 0


def _end_message(status: int) -> Phrase:
    return say(
        "a process that searches plans beside this one has ended ({ending}), perhaps for want of memory: free some, or "
        "let one core do all (taskset -c 0 before the command)",
        ending=ending_phrase(status),
    )


def _send_results(
    work: Callable[[Item], Result], items: Sequence[Item], write_end: int, mask: set[Any], first_pid: int
) -> NoReturn:
    """Do the work of a copy, and end its process without any of the cleanup that belongs to the first one."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # at the end of the first process
        if os.getppid() != first_pid:  # that has ended already
            os._exit(status)
        gc.disable()  # it would touch, and so copy, all memory
        LOGGER.disabled = True
        signal.set_wakeup_fd(-1)
        for number in _ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        all_sent = threading.Event()
        # In a thread, which has `num_processes` 1: there are as many copies as processors already.
        worker = threading.Thread(target=_send_each, args=(work, items, write_end, all_sent))
        worker.start()
        worker.join()
        status = int(not all_sent.is_set())
    finally:
        os._exit(status)


def _send_each(
    work: Callable[[Item], Result], items: Sequence[Item], write_end: int, all_sent: threading.Event
) -> None:
    """Send the result of the work of each item, as (True, result), or (False, None) if it raises an exception."""
    with os.fdopen(write_end, "wb") as pipe:
        for item in items:
            answer: tuple[bool, Result | None] = False, None
            with suppress(Exception):  # the first process does this work itself, and so raises it
                answer = True, work(item)
            pickle.dump(answer, pipe, pickle.HIGHEST_PROTOCOL)
            pipe.flush()
    all_sent.set()
