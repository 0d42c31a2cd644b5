"""Preemption: SIGTERM, SIGUSR1 or Ctrl-C request a run to save after its present step and leave, to be resumed later.

Batch systems send a signal before they take a machine away, and users press Ctrl-C. The command that launched local
ranks handles the signal and passes it on; under torchrun and Slurm each rank handles it itself. Only a run that writes
checkpoints can save.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

from shardwright.config.phrase import say
from shardwright.train.launch.ending import Ended, offering, signal_name

# The exit status of a preempted command, whose run can be resumed.
EXIT_STATUS = 3
PREEMPTIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
REQUESTS = (*PREEMPTIONS, signal.SIGINT)
_INSISTENT = (signal.SIGTERM, signal.SIGINT)  # a second one of these ends the command
# For one press of Ctrl-C, a terminal and a launcher may both send a signal.
ONE_PRESS_S = 1.0
_SAVES = say("interrupted: the run saves at the end of this step and leaves; Ctrl-C again ends it at once, unsaved\n")


class PreemptedEarly(Ended):
    """A command was preempted before its ranks had done a step, and ends at once."""

    status = EXIT_STATUS

    def sentence(self) -> str:
        return early_sentence(self.number)


class EndedUnkept(Ended):
    """A signal ended a command whose run writes no checkpoints."""

    def sentence(self) -> str:
        return say(
            "{ended}; nothing of the run is kept, for it writes no checkpoints (checkpoint.every_steps keeps some)",
            ended=super().sentence(),
        )


@contextmanager
def unkept() -> Iterator[None]:
    """During the block, if a signal ends this command, its message adds that nothing of the run is kept."""
    with offering((), lambda _: False, EndedUnkept):
        yield


class Preemption:
    """The requests to a command that launched ranks. It can be given to `select`, and is readable from the first
    request on.

    Ranks tell their launcher by messages that they can save, and a user may press Ctrl-C before it has read them. So
    while it reads messages each request is taken, and it `answer`s when it has read those that had come before.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.is_watched = False  # True while the launcher reads messages of ranks
        self.can_save = False  # True once all ranks check for requests
        self._stands = self._is_told = False
        self._read_end, self._write_end = os.pipe()

    def fileno(self) -> int:
        """The file descriptor for `select`."""
        return self._read_end

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read_end)
        os.close(self._write_end)

    def takes(self, number: signal.Signals) -> bool:
        """Take a signal as a request to save. Returns False if it is not taken: before ranks are watched, and for a
        second SIGTERM or Ctrl-C, which ends the command."""
        if number not in REQUESTS or (number in _INSISTENT and self.signal in _INSISTENT):
            return False
        if self.signal is None and not self.is_watched:
            return False
        if self.signal is None:
            os.write(self._write_end, b"!")
        if self.signal not in _INSISTENT:
            self.signal = number
        if self.can_save:
            self._stand()
        return True

    def answer(self) -> None:
        """Answer a request that was taken: it stands if ranks can save, else its signal ends the command."""
        if self.can_save:
            self._stand()
        elif self.signal is not None:
            number, self.signal, self.is_watched = self.signal, None, False
            signal.raise_signal(number)

    def _stand(self) -> None:
        """Let the request stand. Tell once that the first Ctrl-C was taken, and how a second one is."""
        self._stands = True
        if self.signal is signal.SIGINT and not self._is_told:
            self._is_told = True
            _tell_that_it_saves()

    def end_of(self, number: signal.Signals) -> Ended:
        """The exception that a signal raises if it is not taken."""
        return PreemptedEarly(number) if number in PREEMPTIONS and not self._stands else Ended(number)


@contextmanager
def heard() -> Iterator[Preemption]:
    """During the block, the first SIGTERM or Ctrl-C, and each SIGUSR1, to this command is taken as a request. Before
    ranks can save, it ends the command."""
    preemption = Preemption()
    try:
        with offering(PREEMPTIONS[1:], preemption.takes, preemption.end_of):
            yield preemption
    finally:
        preemption.close()


class _Flag:
    """The state of one rank: was it requested to save and leave, and does it check for requests yet?"""

    def __init__(self, at_first_step: Callable[[], None]) -> None:
        self.is_set = self.is_watched = False
        self._at_first_step = at_first_step

    def watch(self) -> None:
        """Check for requests at the end of each step from now on."""
        if not self.is_watched:
            self.is_watched = True
            self._at_first_step()


_OF_THIS_RANK: ContextVar[_Flag | None] = ContextVar("preemption", default=None)


def watch_requests() -> None:
    """Let requests to this rank be answered at the end of each step from now on. Ranks call it within their first step,
    before its last collective: so all ranks can save before any of them tells of the step."""
    if (flag := _OF_THIS_RANK.get()) is not None:
        flag.watch()


def is_asked() -> bool:
    """True if this rank was requested to save and leave. Ranks check this before the update of each step, and agree on
    the answer."""
    flag = _OF_THIS_RANK.get()
    return flag is not None and flag.is_set


@contextmanager
def heeded(
    at_first_step: Callable[[], None] = lambda: None,
    before_first_step: Callable[[int], None] = lambda _: None,
    hears_interrupts: bool = False,
    tells: bool = False,
) -> Iterator[None]:
    """During the block, SIGTERM and SIGUSR1 make `is_asked` return True on this rank. The first call of
    `watch_requests` calls `at_first_step`; a signal before that also calls `before_first_step` with its number.

    Ctrl-C reaches all processes of a terminal. With `hears_interrupts`, for ranks without a launcher of ours, the first
    Ctrl-C is a request, which the rank with `tells` reports, and the second ends the rank. Else Ctrl-C is ignored, and
    left to the launcher.
    """
    flag = _Flag(at_first_step)

    def answer(number: int, _: FrameType | None) -> None:
        flag.is_set = True
        if not flag.is_watched:
            before_first_step(number)

    interrupted_s = math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_s
        if time.monotonic() > interrupted_s + ONE_PRESS_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif interrupted_s == math.inf:
            interrupted_s = time.monotonic()
            if tells and flag.is_watched:
                _tell_that_it_saves()
            answer(number, frame)

    token = _OF_THIS_RANK.set(flag)
    try:
        with _handling(answer, interrupt if hears_interrupts else signal.SIG_IGN):
            yield
    finally:
        _OF_THIS_RANK.reset(token)


@contextmanager
def _handling(answer: Any, interrupt: Any) -> Iterator[None]:
    """During the block, `answer` handles PREEMPTIONS, and `interrupt` Ctrl-C. System calls of libraries continue."""
    previous: dict[int, Any] = {}
    for number, handler in [(signal.SIGINT, interrupt), *((number, answer) for number in PREEMPTIONS)]:
        is_ignored = signal.getsignal(number) == signal.SIG_IGN
        # A shell lets processes in its background ignore Ctrl-C. SIGUSR1, the launcher's request, is never ignored.
        if not is_ignored or number not in _INSISTENT:
            previous[number] = signal.signal(number, handler)
            signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None:  # None if the handler was not set by Python, which can't set it again
                signal.signal(number, handler)


def _tell_that_it_saves() -> None:
    """Print _SAVES from a signal handler, which may interrupt a print."""
    with suppress(OSError):
        os.write(2, _SAVES.encode())


def leave_early(rank: int) -> Callable[[int], None]:
    """A handler for a rank without a launcher of ours: a rank that is preempted before its first step ends at once, and
    rank 0 reports it."""

    def leave(number: int) -> NoReturn:
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the signal came in the middle of a print
            sys.stdout.flush()
        if rank == 0:
            with suppress(OSError):
                os.write(2, f"{early_sentence(number)}\n".encode())
        os._exit(EXIT_STATUS)  # a normal exit would wait for other ranks, which may wait for this one

    return leave


def early_sentence(number: int) -> str:
    """The message of a command that was preempted before its ranks had done a step."""
    return say(
        "preempted by {signal} before its ranks had done a step: there was nothing to save; run the same command "
        "again to go on",
        signal=signal_name(number),
    )


def saved_sentence(number: int | None, step: int) -> str:
    """The message of a preempted command whose ranks have saved `step`."""
    if number is None:
        return say("preempted: saved step {step}; run the same command again, without --fresh, to go on", step=step)
    return say(
        "preempted by {signal}: saved step {step}; run the same command again, without --fresh, to go on",
        signal=signal_name(number),
        step=step,
    )
