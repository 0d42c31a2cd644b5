"""The server of ranks: it loads what they need, forks one for each connection that it is sent, and reports how each
ends.

The server ends with the process that started it, and its ranks with the server, even where one of them is stopped.
"""

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
from typing import Any

from shardwright.train.launch.ending import die_of_signals, flush_standard_streams
from shardwright.train.launch.lifeline import follow
from shardwright.train.launch.loading import loading
from shardwright.train.launch.preemption import REQUESTS
from shardwright.train.launch.scratch_folder import remove_scratch_of

# To the server: the number of a rank and whether its run takes REQUESTS for requests, with the rank's end of a
# connection. Back: number, process id, and the status it ended with as os.waitpid gives it, or RUNS.
REQUEST, REPORT = struct.Struct("=i?"), struct.Struct("=iii")
RUNS = -1

# What a rank runs: it is sent over the connection, and is given it.
Run = Callable[["Connection[Any, Any]"], None]


def serve(descriptor: int, launcher: int) -> None:
    """Be the server of process `launcher`, whose requests come over the socket `descriptor`. Never returns."""
    control = socket.socket(fileno=descriptor)
    server = os.getpid()
    ranks: dict[int, int] = {}  # numbers, by process id

    def end() -> None:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        remove_scratch_of(launcher)
        os._exit(0)

    def look(_: int, __: FrameType | None) -> None:
        if os.getpid() == server and os.getppid() != launcher:  # not in a rank that was forked a moment ago
            end()

    if not follow(launcher, signal.SIGKILL):
        end()
    die_of_signals()
    with loading():
        import shardwright.train.launch.preload  # noqa: F401

    # From here on there may be something to clean up. SIGCONT wakes a process that is stopped, and harms no other.
    signal.signal(signal.SIGCONT, look)
    if not follow(launcher, signal.SIGCONT):
        end()
    woken, waker = _woken_by_signals()
    died_of = {number: signal.getsignal(number) for number in REQUESTS}
    while True:
        readable, _, _ = select.select([descriptor, woken], [], [])
        try:
            if descriptor in readable:
                request, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
                if not request:
                    end()
                number, is_preemptible = REQUEST.unpack(request)
                for preemption, before in died_of.items():
                    signal.signal(preemption, _live_on if is_preemptible else before)
                sys.stdout.flush()  # or the rank would print it, too
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for mine in (woken, waker):
                        os.close(mine)
                    control.close()
                    _live(descriptors[0], server)
                os.close(descriptors[0])
                ranks[pid] = number
                control.sendall(REPORT.pack(number, pid, RUNS))
            if woken in readable:
                os.read(woken, 4096)
            for pid, status in [os.waitpid(pid, os.WNOHANG) for pid in ranks]:
                if pid:  # it has ended
                    control.sendall(REPORT.pack(ranks.pop(pid), pid, status))
        except (BrokenPipeError, ConnectionResetError):
            end()


def _woken_by_signals() -> tuple[int, int]:
    """A pipe to read from whose other end every signal writes to, also the end of a child."""
    woken, waker = os.pipe()
    for end_of_pipe in (woken, waker):
        os.set_blocking(end_of_pipe, False)
    signal.signal(signal.SIGCHLD, _live_on)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    return woken, waker


def _live_on(_: int, __: FrameType | None) -> None:
    """Do nothing on a signal."""


def _live(descriptor: int, server: int) -> None:
    """A rank's whole life, in its own process. Never returns."""
    status = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, signal.SIG_DFL)
        if follow(server, signal.SIGKILL):
            status = serve_rank(Connection(descriptor))
    finally:
        os._exit(status)


def serve_rank(connection: "Connection[Any, Any]") -> int:
    """Receive what to run over the connection, and run it. Returns the status to end with."""
    try:
        run: Run = connection.recv()
    except EOFError:  # whoever started this rank has ended
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
