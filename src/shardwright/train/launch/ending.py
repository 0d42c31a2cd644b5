"""Ctrl-C, SIGTERM and SIGHUP end a command with one sentence that names the signal, whatever it is at.

The handler raises `Ended` where the main thread is, so that everything on its way out is cleaned up: ranks, folders.
The main thread may be inside a library for long, or inside code that drops every exception; then a thread ends the
process. What it started ends with it in either case (train/launch/lifeline.py).
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

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# Time for a way out that cleans up.
LATEST_S = 5.0
# Time to leave a callback.
AGAIN_S = 0.01

_Handlers = dict[signal.Signals, Any]


class Ended(BaseException):
    """A signal told this process to end."""

    status = 1

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number

    def sentence(self) -> str:
        """The end as the user reads it."""
        return f"failed: {self.number.name} ended this command and all that it had started"


def signal_name(number: int) -> str:
    """The name of a signal as in `kill -l`, with its SIG."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@contextmanager
def held_back() -> Iterator[None]:
    """None of the signals is delivered before the end of the block. A process that is started in it begins so, too."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_of_signals() -> None:
    """Have signals end this process at once and silently, as it suits a rank: who started it says what happened.

    What was held back meanwhile is delivered. What the user had ignored, as `nohup` does, stays so.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def telling_of_signals(command: Callable[[], None]) -> None:
    """Run a command. A signal ends the process with one sentence, and status 1 if nobody takes it for a request."""
    if threading.current_thread() is not threading.main_thread():
        command()  # handlers are the main thread's
        return
    told: list[Ended] = []
    try:
        with _raising(told):
            command()
    except BaseException:
        # Another error may have been made of `Ended`, with a link to it or without: pydantic keeps its text alone.
        if not told:
            raise
        _leave(told[0])


def ending_at_once(command: Callable[[], None]) -> None:
    """Run a command, and end the process with it where torch was loaded: the interpreter's own way out would take that
    apart object by object, for half a second. What others have left to do at the end is done before."""
    status = 0
    try:
        command()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if "torch" not in sys.modules:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    flush_standard_streams()
    os._exit(status)


def flush_standard_streams() -> None:
    """Write what was printed, where that can be written: not to a full disk, nor to what is closed."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None is one that was closed before we began
        with suppress(OSError, ValueError):
            stream.flush()


class Handler:
    """The handler of signals in a command: the first one raises `Ended` in the main thread.

    `takes` is offered each of them before, and may take it so that the command goes on; `end_of` makes what is raised,
    and `told` has it from then on.
    """

    def __init__(self, again: int, told: list[Ended]) -> None:
        self.told = told
        self.in_hook = False
        self.takes: Callable[[signal.Signals], bool] | None = None
        self.end_of: Callable[[signal.Signals], Ended] = Ended
        self.taken_s = -math.inf
        self._again = again

    def __call__(self, number: int, _: FrameType | None) -> None:
        if self.in_hook:  # where nothing can be raised either
            os.write(self._again, bytes([number]))
        elif not self.told:  # a second one does not disturb the way out
            if self.takes is not None and self.takes(signal.Signals(number)):
                self.taken_s = time.monotonic()
                return
            self.told.append(self.end_of(signal.Signals(number)))
            raise self.told[0]


@contextmanager
def offering(
    more: tuple[signal.Signals, ...],
    takes: Callable[[signal.Signals], bool],
    end_of: Callable[[signal.Signals], Ended],
) -> Iterator[None]:
    """While it lasts, signals to this command, and `more` of them, are offered to `takes`, and those that it leaves
    raise what `end_of` makes. Outside of a command, in a program of the user's, that is Ctrl-C alone, and one that is
    left is a KeyboardInterrupt. Nothing changes for signals that the user had ignored."""
    handler = next((found for found in map(signal.getsignal, SIGNALS) if isinstance(found, Handler)), None)
    if handler is None:
        with _offering_interrupts(takes):
            yield
        return
    before = {number: signal.getsignal(number) for number in more}
    handled = [number for number in more if before[number] != signal.SIG_IGN]
    handler.takes, handler.end_of = takes, end_of
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        if not handler.told:
            for number in handled:
                signal.signal(number, before[number])
            handler.takes, handler.end_of = None, Ended


@contextmanager
def _offering_interrupts(takes: Callable[[signal.Signals], bool]) -> Iterator[None]:
    """While it lasts, `takes` is offered what else would be a KeyboardInterrupt in the main thread."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not is_main:
        yield
        return

    def answer(number: int, frame: FrameType | None) -> None:
        if not takes(signal.Signals(number)):
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _raising(told: list[Ended]) -> Iterator[None]:
    """Signals raise `Ended`, once, and leave it in `told`. Whatever they did before, they do again afterwards."""
    heard, ours = os.pipe()
    os.set_blocking(ours, False)
    dropped, again = os.pipe()
    handler = Handler(again, told)

    def try_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, Ended):
            hook_before(unraisable)
            return
        handler.in_hook = True
        os.write(again, bytes([handler.told.pop().number]))  # it came up in a callback: Python drops what is raised
        handler.in_hook = False

    hook_before, sys.unraisablehook = sys.unraisablehook, try_again
    for answering, arguments in ((_end_the_stuck, (heard, handler)), (_send_again, (dropped,))):
        threading.Thread(target=answering, args=arguments, name="signals", daemon=True).start()
    before: _Handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
    fd_before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        if not handler.told:  # else the process is on its way out, and nothing may disturb it
            for number in handled:
                signal.signal(number, before[number])
            signal.set_wakeup_fd(fd_before)
            os.close(ours)
            os.close(again)


def _send_again(dropped: int) -> None:
    """Send signals to this process once more, a moment after what they raised was dropped."""
    while number := os.read(dropped, 1):
        time.sleep(AGAIN_S)
        os.kill(os.getpid(), number[0])
    os.close(dropped)


def _end_the_stuck(heard: int, handler: Handler) -> None:
    """End the process some time after a signal, if the main thread has not, nor has had it taken."""
    while number := os.read(heard, 1):
        if number[0] in SIGNALS:
            read_s = time.monotonic()
            time.sleep(LATEST_S)
            if handler.taken_s < read_s - 1.0:  # it may have been taken just before this thread read of it
                _leave(handler.told[0] if handler.told else handler.end_of(signal.Signals(number[0])))
    os.close(heard)


def _leave(ended: Ended) -> None:
    """End without the interpreter's own way out: libraries that were interrupted at their import would crash in it."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(ended.sentence(), file=sys.stderr, flush=True)
    _wake_children()
    os._exit(ended.status)


def _wake_children() -> None:
    """Let children that are stopped go on, so that they see the end of this process: also one that was started a moment
    ago, and has not asked the system to be told. Elsewhere than on Linux nobody can tell which they are."""
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for child in _children_of(task):
                with suppress(OSError):  # it has ended meanwhile
                    os.kill(child, signal.SIGCONT)


def _children_of(task: Path) -> list[int]:
    """Process ids of a thread's children; none if the thread has ended."""
    with suppress(OSError):
        return [int(child) for child in (task / "children").read_text().split()]
    return []
