"""Ctrl-C, SIGTERM and SIGHUP end a command at any time, with one sentence that names the signal.

The handler raises `Ended` in the main thread, so that ranks and folders are cleaned up. The main thread may be inside a
library for long, or inside code that drops every exception; then another thread ends the process. Child processes end
with it in either case (train/launch/forking.py).
"""

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from shardwright.config.phrase import in_language, language_of_locale, say

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# How long the main thread may take to clean up.
LATEST_S = 5.0
# Delay before a dropped signal is sent again, in which Python leaves the callback that dropped it.
AGAIN_S = 0.01

_Handlers = dict[signal.Signals, Any]


class Ended(BaseException):
    """A signal told this process to end."""

    status = 1

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number

    def sentence(self) -> str:
        """The message for the user."""
        return say("failed: {signal} ended this command and all that it had started", signal=self.number.name)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@contextmanager
def held_back() -> Iterator[None]:
    """Block SIGNALS until the end of the block. A process started in the block begins with them blocked, too."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def die_of_signals() -> None:
    """Let SIGNALS end this process at once and silently, which suits a rank: its launcher explains the end.

    Signals that were blocked meanwhile are delivered. Signals that the user ignores, as with `nohup`, stay ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def telling_of_signals(command: Callable[[], None]) -> None:
    """Run a command. A signal ends the process with one sentence and status 1, unless it is taken as a request."""
    if threading.current_thread() is not threading.main_thread():
        command()  # only the main thread can have signal handlers
        return
    raised: list[Ended] = []
    try:
        with _raising(raised):
            command()
    except BaseException:
        # `Ended` may arrive as another exception, with or without a link to it: pydantic keeps its text alone.
        if not raised:
            raise
        _leave(raised[0])


def ending_at_once(command: Callable[[], None]) -> None:
    """Run a command, and end the process after it without the interpreter's own cleanup if torch was loaded: freeing
    torch's objects one by one takes half a second. Threads and exit handlers are finished first."""
    status = 0
    try:
        command()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if "torch" not in sys.modules:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    flush_standard_streams()
    os._exit(status)


def flush_standard_streams() -> None:
    """Flush the standard streams. Errors are ignored, such as a full disk or a closed stream."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed before the process began
        with suppress(OSError, ValueError):
            stream.flush()


class Handler:
    """The signal handler of a command: the first signal raises `Ended` in the main thread.

    Before that, `takes` is called with the signal, and may return True so that the command continues. `end_of` makes
    the exception, and `raised` holds it from then on. Signals that arrive within the hook for dropped exceptions are
    written to the pipe `resend_pipe`.
    """

    def __init__(self, resend_pipe: int, raised: list[Ended]) -> None:
        self.raised = raised
        self.in_hook = False
        self.takes: Callable[[signal.Signals], bool] | None = None
        self.end_of: Callable[[signal.Signals], Ended] = Ended
        self.taken_s = -math.inf
        self._resend_pipe = resend_pipe

    def __call__(self, number: int, _: FrameType | None) -> None:
        if self.in_hook:  # an exception would be dropped here, too
            os.write(self._resend_pipe, bytes([number]))
        elif not self.raised:  # a second signal does not disturb the cleanup
            if self.takes is not None and self.takes(signal.Signals(number)):
                self.taken_s = time.monotonic()
                return
            self.raised.append(self.end_of(signal.Signals(number)))
            raise self.raised[0]


@contextmanager
def offering(
    more_signals: tuple[signal.Signals, ...],
    takes: Callable[[signal.Signals], bool],
    end_of: Callable[[signal.Signals], Ended],
) -> Iterator[None]:
    """During the block, `takes` is called with each signal to this command, also with `more_signals`. If it returns
    False, the signal raises the exception made by `end_of`. Outside of a command, in a user's program, this applies to
    Ctrl-C alone, which else raises KeyboardInterrupt. Signals that the user ignores stay ignored."""
    current_handlers = map(signal.getsignal, SIGNALS)
    handler = next((handler for handler in current_handlers if isinstance(handler, Handler)), None)
    if handler is None:
        with _offering_interrupts(takes):
            yield
        return
    previous = {number: signal.getsignal(number) for number in more_signals}
    handled = [number for number in more_signals if previous[number] != signal.SIG_IGN]
    handler.takes, handler.end_of = takes, end_of
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        if not handler.raised:
            for number in handled:
                signal.signal(number, previous[number])
            handler.takes, handler.end_of = None, Ended


@contextmanager
def _offering_interrupts(takes: Callable[[signal.Signals], bool]) -> Iterator[None]:
    """During the block, `takes` is called for Ctrl-C in the main thread; if it returns False, KeyboardInterrupt is
    raised."""
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if previous is not signal.default_int_handler or not is_main:
        yield
        return

    def answer(number: int, frame: FrameType | None) -> None:
        if not takes(signal.Signals(number)):
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _raising(raised: list[Ended]) -> Iterator[None]:
    """During the block, the first signal raises `Ended`, which is also put into `raised`. Afterwards the previous
    handlers are set again."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    resend_read, resend_write = os.pipe()
    handler = Handler(resend_write, raised)

    def resend_dropped(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, Ended):
            previous_hook(unraisable)
            return
        handler.in_hook = True
        # The signal arrived within a callback, whose exceptions Python drops.
        os.write(resend_write, bytes([handler.raised.pop().number]))
        handler.in_hook = False

    previous_hook, sys.unraisablehook = sys.unraisablehook, resend_dropped
    for target, arguments in ((_end_the_stuck, (wakeup_read, handler)), (_send_again, (resend_read,))):
        threading.Thread(target=target, args=arguments, name="signals", daemon=True).start()
    previous: _Handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if previous[number] not in (signal.SIG_IGN, None)]
    previous_fd = signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        if not handler.raised:  # else the process is ending, and nothing may disturb that
            for number in handled:
                signal.signal(number, previous[number])
            signal.set_wakeup_fd(previous_fd)
            os.close(wakeup_write)
            os.close(resend_write)


def _send_again(pipe: int) -> None:
    """Send this process each signal again whose exception was dropped, a moment later. Signals come from `pipe`."""
    while number := os.read(pipe, 1):
        time.sleep(AGAIN_S)
        os.kill(os.getpid(), number[0])
    os.close(pipe)


def _end_the_stuck(pipe: int, handler: Handler) -> None:
    """End the process LATEST_S after a signal, unless the main thread has ended it, or the signal was taken as a
    request. Signals come from `pipe`."""
    while number := os.read(pipe, 1):
        if number[0] in SIGNALS:
            read_s = time.monotonic()
            time.sleep(LATEST_S)
            if handler.taken_s < read_s - 1.0:  # the handler may have taken it just before this thread read it
                _leave(handler.raised[0] if handler.raised else handler.end_of(signal.Signals(number[0])))
    os.close(pipe)


def _leave(ended: Ended) -> None:
    """End the process without the interpreter's cleanup, which crashes in libraries whose import was interrupted."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(in_language(ended.sentence(), language_of_locale()), file=sys.stderr, flush=True)
    _wake_children()
    os._exit(ended.status)


def _wake_children() -> None:
    """Continue stopped children, so that they notice the end of this process, also a child started a moment ago that
    does not follow this process yet (forking.py). Children are found on Linux alone."""
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for child in _children_of(task):
                with suppress(OSError):  # the child has ended meanwhile
                    os.kill(child, signal.SIGCONT)


def _children_of(task: Path) -> list[int]:
    """The process ids of a thread's children; empty if the thread has ended."""
    with suppress(OSError):
        return [int(child) for child in (task / "children").read_text().split()]
    return []
