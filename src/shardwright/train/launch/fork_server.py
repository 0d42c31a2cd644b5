"""The server that ranks are forked from on a CPU: it loads torch once, and each rank is up in a fraction of a second.

They are not forked from the process that launches them, whose threads and sockets (the rendezvous store's) they would
inherit. CUDA does not survive a fork, so there they are spawned and need no server.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwright.train.launch.ending import held_back, signal_name
from shardwright.train.launch.forking import REPORT, REQUEST, RUNS
from shardwright.train.launch.lifeline import ask_for

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # NVIDIA's and AMD's, told without torch
ENDING_S = 2.0


class ServerEndedError(RuntimeError):
    """The server is gone, and with it all ranks."""


@dataclass
class ForkedRank:
    """A rank, as far as the server has told of it: no process id before it is forked, no status before it has ended. A
    status is an exit status, or the negative number of a signal."""

    pid: int = 0
    status: int | None = None

    def is_running(self) -> bool:
        """True if it has been forked and has not ended."""
        return self.pid > 0 and self.status is None

    def send(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.is_running():
            with suppress(ProcessLookupError):  # its report is on the way
                os.kill(self.pid, number)


class Server:
    """The server's process, and what it has said of its ranks."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        main = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from shardwright.train.launch.forking import serve\n"
            f"serve({theirs.fileno()}, {os.getpid()})"
        )
        with theirs, held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-c", main],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=ask_for(signal.SIGKILL),
            )
        self._ranks: list[ForkedRank] = []

    def fork(self, descriptor: int, is_preemptible: bool) -> ForkedRank:
        """Have it fork a rank that talks over a connection; the server outlives the signals that a run takes for
        requests where `is_preemptible`. Raises ServerEndedError."""
        try:
            socket.send_fds(self._control, [REQUEST.pack(len(self._ranks), is_preemptible)], [descriptor])
        except OSError:
            raise ServerEndedError(self.obituary()) from None
        self._ranks.append(ForkedRank())
        return self._ranks[-1]

    def fileno(self) -> int:
        """For select: readable when there is a report, or the server has ended."""
        return self._control.fileno()

    def listen(self) -> None:
        """Take in one report. Raises ServerEndedError."""
        report = b""
        with suppress(OSError):
            report = self._control.recv(REPORT.size, socket.MSG_WAITALL)
        if not report:
            raise ServerEndedError(self.obituary())
        number, pid, status = REPORT.unpack(report)
        rank = self._ranks[number]
        rank.pid = pid
        rank.status = None if status == RUNS else os.waitstatus_to_exitcode(status)

    def is_alive(self) -> bool:
        """True if the process runs, or is stopped."""
        return self._process.poll() is None

    def obituary(self) -> str:
        """How it ended, in words."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(ENDING_S)
            if status < 0:
                return f"the server that ranks are forked from was killed by {signal_name(-status)}"
            return f"the server that ranks are forked from ended with status {status}"
        return "the server that ranks are forked from does not listen any more"

    def end(self) -> None:
        """End it and all ranks."""
        self._control.close()
        running = [rank for rank in self._ranks if rank.is_running()]
        if running and self.is_alive():
            self._process.send_signal(signal.SIGCONT)  # so that it hears of it, too, where it is stopped
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        if self.is_alive():
            for rank in running:
                rank.send(signal.SIGKILL)
        self._process.kill()
        self._process.wait()


@cache
def _server() -> Server:
    """The server of this process: one is enough for all its runs."""
    server = Server()
    atexit.register(server.end)
    return server


def start_server() -> Server:
    """Start it, unless it runs. One that ended before it was needed is missed by nobody."""
    if not _server().is_alive():
        _server.cache_clear()
    return _server()


def end_server() -> None:
    """End it and all ranks. The next `start_server` starts another."""
    _server().end()
    _server.cache_clear()


def start_server_early(device: str) -> None:
    """Start it if a job with that `run.device` will need it, as far as one can tell without torch.

    A command that launches ranks does so first of all: the server loads torch while the command does the same.
    """
    if device == "cpu" or (device == "auto" and not any(Path(driver).exists() for driver in _GPU_DRIVERS)):
        start_server()
