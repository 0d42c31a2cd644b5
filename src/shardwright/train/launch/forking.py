"""The server of ranks: it imports modules for ranks, forks a rank for each connection that it receives, and reports how
each rank ends.

The server ends with the process that started it, and ranks end with the server, even if a process is stopped: Linux
sends a child a signal at its parent's end. On other systems a child must check itself.
"""

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from shardwright.train.launch.ending import die_of_signals, flush_standard_streams
from shardwright.train.launch.loading import loading, preload
from shardwright.train.launch.preemption import REQUESTS
from shardwright.train.launch.scratch_folder import remove_scratch_of

_PR_SET_PDEATHSIG = 1


# To the server: the number of a rank and True if its run is preemptible, with the rank's end of a connection.
# From the server: number, process id, and the exit status from os.waitpid, or RUNS.
REQUEST, REPORT = struct.Struct("=i?"), struct.Struct("=iii")
RUNS = -1

# The function that a rank runs. It is sent over the connection, and called with it.
Run = Callable[["Connection[Any, Any]"], None]


def serve(descriptor: int, launcher: int) -> None:
    """Serve process `launcher`, whose requests come over the socket `descriptor`. Never returns."""
    server = _Server(socket.socket(fileno=descriptor), launcher)
    if not follow(launcher, signal.SIGKILL):
        server.end()
    die_of_signals()
    with loading():
        preload()
    # From here on the server must clean up, so SIGCONT replaces SIGKILL. It also continues a stopped process.
    signal.signal(signal.SIGCONT, server.end_with_launcher)
    if not follow(launcher, signal.SIGCONT):
        server.end()
    server.listen()


class _Server:
    """The server's side of the connection to its launcher, and the running ranks: their numbers, by process id."""

    def __init__(self, control: socket.socket, launcher: int) -> None:
        self._control, self._launcher, self._pid = control, launcher, os.getpid()
        self._ranks: dict[int, int] = {}

    def end(self) -> NoReturn:
        """End all ranks, and this process."""
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._ranks:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        remove_scratch_of(self._launcher)
        os._exit(0)

    def end_with_launcher(self, _: int, __: FrameType | None) -> None:
        """End if the launcher has ended: a signal handler."""
        if os.getpid() == self._pid and os.getppid() != self._launcher:  # not in a rank that was forked a moment ago
            self.end()

    def listen(self) -> NoReturn:
        """Fork ranks, and report their ends, until the launcher ends."""
        control, pipe = self._control.fileno(), _wakeup_pipe()
        default_handlers = {number: signal.getsignal(number) for number in REQUESTS}
        while True:
            readable, _, _ = select.select([control, pipe[0]], [], [])
            try:
                if control in readable:
                    request, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, 1)
                    if not request:
                        self.end()
                    number, is_preemptible = REQUEST.unpack(request)
                    for preemption, default in default_handlers.items():
                        signal.signal(preemption, _do_nothing if is_preemptible else default)
                    self._fork(number, descriptors[0], pipe)
                if pipe[0] in readable:
                    os.read(pipe[0], 4096)
                for pid, status in [os.waitpid(pid, os.WNOHANG) for pid in self._ranks]:
                    if pid:  # the rank has ended
                        self._control.sendall(REPORT.pack(self._ranks.pop(pid), pid, status))
            except (BrokenPipeError, ConnectionResetError):
                self.end()

    def _fork(self, number: int, descriptor: int, pipe: tuple[int, int]) -> None:
        """Fork a rank, which gets the connection `descriptor` and none of what the server holds."""
        sys.stdout.flush()  # else the rank would print the same text again
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for pipe_end in pipe:
                os.close(pipe_end)
            self._control.close()
            _live(descriptor, self._pid)
        os.close(descriptor)
        self._ranks[pid] = number
        self._control.sendall(REPORT.pack(number, pid, RUNS))


def _wakeup_pipe() -> tuple[int, int]:
    """A pipe to which every signal writes, also SIGCHLD: its read end and its write end."""
    wakeup_read, wakeup_write = os.pipe()
    for pipe_end in (wakeup_read, wakeup_write):
        os.set_blocking(pipe_end, False)
    signal.signal(signal.SIGCHLD, _do_nothing)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    return wakeup_read, wakeup_write


def _do_nothing(_: int, __: FrameType | None) -> None:
    """A signal handler, with which a signal does not end the process but writes to the wakeup pipe."""


def _live(descriptor: int, server: int) -> NoReturn:
    """Run a rank in its own process. Never returns."""
    status = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, signal.SIG_DFL)
        if follow(server, signal.SIGKILL):
            status = serve_rank(Connection(descriptor))
    finally:
        os._exit(status)


def serve_rank(connection: "Connection[Any, Any]") -> int:
    """Receive the rank's function over the connection, and run it. Returns the exit status."""
    try:
        run: Run = connection.recv()
    except EOFError:  # the launcher has ended
        return 1
    try:
        run(connection)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    flush_standard_streams()
    return status


def follow(parent: int, number: int) -> bool:
    """Let the system send this process signal `number` when `parent` ends. False if it has ended already.

    Linux counts the end of the thread that started this process as the parent's end.
    """
    ask_for(number)()
    return os.getppid() == parent


def ask_for(number: int) -> Callable[[], None]:
    """A function that lets the system send signal `number` at the parent's end. A child calls it before its program
    begins."""
    if sys.platform != "linux":
        return lambda: None
    ask = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: ask(_PR_SET_PDEATHSIG, number, 0, 0, 0)
