"""A request to save at the end of the step and to leave, so that the run can go on later: SIGTERM, SIGUSR1 or Ctrl-C.

Batch systems send one before they take a machine away, and people who have seen enough press Ctrl-C. The command that
launched the ranks hears it and tells them; under torchrun and Slurm each rank hears it itself. Only a run that writes
checkpoints has anything to save.
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

from shardwright.train.launch.ending import Ended, offering, signal_name

# The exit status of a command that was preempted, and can go on.
STATUS = 3
PREEMPTIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
REQUESTS = (*PREEMPTIONS, signal.SIGINT)
_MEANT = (signal.SIGTERM, signal.SIGINT)  # whoever sends two of these wants the end
# A terminal and a launcher may both send the one Ctrl-C that a user has pressed.
ONE_PRESS_S = 1.0
_SAVES = "interrupted: the run saves at the end of this step and leaves; Ctrl-C again ends it at once, unsaved\n"


class PreemptedEarly(Ended):
    """A command was preempted before its ranks had done a step: it ends at once."""

    status = STATUS

    def sentence(self) -> str:
        return early_sentence(self.number)


class EndedUnkept(Ended):
    """A command was ended that keeps nothing of its run."""

    def sentence(self) -> str:
        return (
            f"{super().sentence()}; nothing of the run is kept, for it writes no checkpoints (checkpoint.every_steps "
            "keeps some)"
        )


@contextmanager
def unkept() -> Iterator[None]:
    """While it lasts, a signal that ends this command says that nothing of its run is kept."""
    with offering((), lambda _: False, EndedUnkept):
        yield


class Preemption:
    """The requests to the command that launches ranks. It can be given to `select`: readable from the first one on."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        # Whether all ranks have come as far as to look at requests.
        self.can_save = False
        self._woken, self._waker = os.pipe()

    def fileno(self) -> int:
        """For select."""
        return self._woken

    def close(self) -> None:
        """Give its descriptors back."""
        os.close(self._woken)
        os.close(self._waker)

    def takes(self, number: signal.Signals) -> bool:
        """Return whether a signal is taken as a request to save. None is before ranks can save; nor is a second SIGTERM
        or Ctrl-C: who sends two wants the command to end."""
        if number not in REQUESTS or (number in _MEANT and self.signal in _MEANT):
            return False
        if self.signal is None and not self.can_save:
            return False
        if self.signal is None:
            os.write(self._waker, b"!")
        if self.signal not in _MEANT:
            self.signal = number
        if number is signal.SIGINT:
            _tell_that_it_saves()
        return True

    def end_of(self, number: signal.Signals) -> Ended:
        """Return the exception that a signal raises which is not taken."""
        return PreemptedEarly(number) if number in PREEMPTIONS and self.signal is None else Ended(number)


@contextmanager
def heard() -> Iterator[Preemption]:
    """While it lasts, the first SIGTERM or Ctrl-C and each SIGUSR1 to this command is a request. Where ranks can't save
    yet, it ends the command."""
    preemption = Preemption()
    try:
        with offering(PREEMPTIONS[1:], preemption.takes, preemption.end_of):
            yield preemption
    finally:
        preemption.close()


class _Flag:
    """A request to save and leave, as one rank hears it, and a note that the rank has looked."""

    def __init__(self, at_first_look: Callable[[], None]) -> None:
        self.is_set = self.was_seen = False
        self._at_first_look = at_first_look

    def look(self) -> bool:
        """True if it is set."""
        if not self.was_seen:
            self.was_seen = True
            self._at_first_look()
        return self.is_set


_OF_THIS_RANK: ContextVar[_Flag | None] = ContextVar("preemption", default=None)


def is_asked() -> bool:
    """True if this rank was asked to save and leave. Ranks look at the end of each step, and agree on the answer."""
    flag = _OF_THIS_RANK.get()
    return flag is not None and flag.look()


@contextmanager
def heeded(
    at_first_look: Callable[[], None] = lambda: None, before_a_look: Callable[[int], None] = lambda _: None,
    hears_interrupts: bool = False, tells: bool = False,
) -> Iterator[None]:  # fmt: skip
    """While it lasts, SIGTERM and SIGUSR1 set what `is_asked` returns on this rank. Before the first look at it they
    call `before_a_look` with their number, too; that look calls `at_first_look`.

    Ctrl-C reaches all processes of a terminal. Where no launcher of ours hears it, a rank that `hears_interrupts` takes
    the first for a request, which one of them `tells`, and ends with the second; others leave it to the launcher.
    """
    flag = _Flag(at_first_look)

    def answer(number: int, _: FrameType | None) -> None:
        flag.is_set = True
        if not flag.was_seen:
            before_a_look(number)

    interrupted_s = math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_s
        if time.monotonic() > interrupted_s + ONE_PRESS_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif interrupted_s == math.inf:
            interrupted_s = time.monotonic()
            if tells and flag.was_seen:
                _tell_that_it_saves()
            answer(number, frame)

    before: dict[int, Any] = {}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell ignores it for what runs in its background
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt if hears_interrupts else signal.SIG_IGN)
        signal.siginterrupt(signal.SIGINT, False)
    for number in PREEMPTIONS:
        handler = signal.getsignal(number)
        if handler != signal.SIG_IGN or number != signal.SIGTERM:  # the launcher's own way to ask is always heard
            before[number] = signal.signal(number, answer)
            signal.siginterrupt(number, False)  # system calls of libraries go on
    token = _OF_THIS_RANK.set(flag)
    try:
        yield
    finally:
        _OF_THIS_RANK.reset(token)
        for number, handler in before.items():
            if handler is not None:  # None is a handler that no Python has set, and none can set again
                signal.signal(number, handler)


def _tell_that_it_saves() -> None:
    """Say so from a signal's handler, which may have come in the middle of a print."""
    with suppress(OSError):
        os.write(2, _SAVES.encode())


def leave_early(rank: int) -> Callable[[int], None]:
    """Make the handler of a rank that no launcher of ours watches: preempted before its first step, it ends at once,
    and rank 0 says so."""

    def leave(number: int) -> NoReturn:
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the signal came in the middle of a print
            sys.stdout.flush()
        if rank == 0:
            with suppress(OSError):
                os.write(2, f"{early_sentence(number)}\n".encode())
        os._exit(STATUS)  # others may wait for it: no way out that waits for them

    return leave


def early_sentence(number: int) -> str:
    """The end of a command that was preempted before its ranks had done a step."""
    return (
        f"preempted by {signal_name(number)} before its ranks had done a step: there was nothing to save; run the same "
        "command again to go on"
    )


def saved_sentence(number: int | None, step: int) -> str:
    """The end of a command whose ranks have saved."""
    by = f" by {signal_name(number)}" if number is not None else ""
    return f"preempted{by}: saved step {step}; run the same command again, without --fresh, to go on"
