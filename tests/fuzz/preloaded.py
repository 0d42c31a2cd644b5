"""Commands that begin at once: forked from a process that has loaded what they need.

Loading torch takes a command some seconds, and its server of ranks again: most of the time of a run of a few steps.
Here both are forked, and from there on are what they would be: the same code, in processes of their own, with the
files, signals and parents of a command that a shell starts. Whoever forks should have no thread but its first.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwright.train.launch import fork_server
from shardwright.train.launch.forking import ask_for
from shardwright.train.launch.loading import loading, preload

with loading():
    preload()
    from shardwright import __main__ as command_line
    from shardwright.cli import main as _of_the_command  # noqa: F401

_LOOK_S = 0.002


class Child:
    """A process forked from this one, with what a launcher and its tests use of subprocess.Popen."""

    def __init__(self, life: Callable[[], None], descriptors: Sequence[int] = ()) -> None:
        """Fork it for `life`. Of what is open here it has the standard streams and `descriptors`."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            live(life, descriptors)

    def poll(self) -> int | None:
        """Its exit status, or the negative number of the signal that ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        late_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > late_s:
                raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[str], output: Path) -> Child:
    """Start `shardwright ARGUMENTS`. Its output is added to a file."""

    def life() -> None:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(out, stream)
        run(arguments)

    own = os.getpid()

    def follow() -> None:
        ask_for(signal.SIGKILL)()  # nothing of it outlives whoever tests it
        if os.getppid() == own:
            life()

    return Child(follow)


def run(arguments: Sequence[str]) -> None:
    """Be `shardwright ARGUMENTS`, which loads torch no second time for its server of ranks."""
    sys.argv = ["shardwright", *arguments]
    fork_servers()
    command_line.main()


def fork_servers() -> None:
    """Have the server of ranks forked from this process from here on."""
    forking = {"Popen": _server, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    vars(fork_server)["subprocess"] = SimpleNamespace(**forking)


def command(*arguments: str) -> list[str]:
    """The command line of `shardwright ARGUMENTS` that does so."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from fuzz import preloaded; preloaded.run(sys.argv[1:])"
    return [sys.executable, "-c", program, *arguments]


def _server(command: Sequence[str], *, pass_fds: Sequence[int], preexec_fn: Callable[[], object], stdin: int) -> Child:
    """The server of ranks: what `python -c` would be."""

    def life() -> None:
        preexec_fn()
        exec(command[-1], {"__name__": "__main__"})

    return Child(life, pass_fds)


def live(life: Callable[[], None], descriptors: Sequence[int] = ()) -> Any:
    """A life in a process that was forked, as far as it can be a new one's. Never returns."""
    status = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        sys.unraisablehook = sys.__unraisablehook__
        atexit._clear()
        _close_all_but((0, 1, 2, *descriptors))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        life()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = raised = sys.exc_info()  # as Python does
        sys.excepthook(*raised)
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _close_all_but(kept: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
