"""The process that forks ranks on a CPU: it loads torch once, and each rank starts in a fraction of a second.

Ranks are not forked from the launching process, because they would inherit its threads and sockets (of the rendezvous
store). CUDA does not survive a fork, so ranks on CUDA are spawned, and need no server.
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

from shardwright.config.phrase import say
from shardwright.train.launch.ending import held_back, signal_name
from shardwright.train.launch.forking import REPORT, REQUEST, RUNS, ask_for

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # NVIDIA's and AMD's, which can be seen without torch
ENDING_S = 2.0


class ServerEndedError(RuntimeError):
    """The server has ended, and with it all ranks."""


@dataclass
class ForkedRank:
    """The state of a rank, as the server has reported it: `pid` is 0 before it is forked, and `status` is None before
    it has ended. A status is an exit status, or the negative number of a signal."""

    pid: int = 0
    status: int | None = None

    def is_running(self) -> bool:
        """True if it has been forked and has not ended."""
        return self.pid > 0 and self.status is None

    def send(self, number: int) -> None:
        """Send the rank a signal, if it runs."""
        if self.is_running():
            with suppress(ProcessLookupError):  # it has ended, and the report is on the way
                os.kill(self.pid, number)


class Server:
    """The server's process, and the state of its ranks."""

    def __init__(self) -> None:
        self._control, server_socket = socket.socketpair()
        main = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from shardwright.train.launch.forking import serve\n"
            f"serve({server_socket.fileno()}, {os.getpid()})"
        )
        with server_socket, held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-c", main],
                pass_fds=[server_socket.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=ask_for(signal.SIGKILL),
            )
        self._ranks: list[ForkedRank] = []

    def fork(self, descriptor: int, is_preemptible: bool) -> ForkedRank:
        """Let the server fork a rank, which gets the connection `descriptor`. If `is_preemptible`, the server ignores
        the signals that are requests to the run. Raises ServerEndedError."""
        try:
            socket.send_fds(self._control, [REQUEST.pack(len(self._ranks), is_preemptible)], [descriptor])
        except OSError:
            raise ServerEndedError(self.end_message()) from None
        self._ranks.append(ForkedRank())
        return self._ranks[-1]

    def fileno(self) -> int:
        """The file descriptor for `select`: readable if there is a report, or the server has ended."""
        return self._control.fileno()

    def listen(self) -> None:
        """Receive one report on a rank. Raises ServerEndedError."""
        report = b""
        with suppress(OSError):
            report = self._control.recv(REPORT.size, socket.MSG_WAITALL)
        if not report:
            raise ServerEndedError(self.end_message())
        number, pid, status = REPORT.unpack(report)
        rank = self._ranks[number]
        rank.pid = pid
        rank.status = None if status == RUNS else os.waitstatus_to_exitcode(status)

    def is_alive(self) -> bool:
        """True if the server's process runs, or is stopped."""
        return self._process.poll() is None

    def end_message(self) -> str:
        """The message about the server's end."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(ENDING_S)
            if status < 0:
                return say("the server that ranks are forked from was killed by {signal}", signal=signal_name(-status))
            return say("the server that ranks are forked from ended with status {status}", status=status)
        return say("the server that ranks are forked from does not listen any more")

    def end(self) -> None:
        """End the server and all ranks."""
        self._control.close()
        running = [rank for rank in self._ranks if rank.is_running()]
        if running and self.is_alive():
            self._process.send_signal(signal.SIGCONT)  # a stopped server must continue to see its socket closed
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        if self.is_alive():
            for rank in running:
                rank.send(signal.SIGKILL)
        self._process.kill()
        self._process.wait()


@cache
def _server() -> Server:
    """The server of this process, which serves all of its runs."""
    server = Server()
    atexit.register(server.end)
    return server


def start_server() -> Server:
    """Start the server of this process, unless it runs; a server that has ended is replaced."""
    if not _server().is_alive():
        _server.cache_clear()
    return _server()


def end_server() -> None:
    """End the server of this process and all ranks. The next `start_server` starts another."""
    _server().end()
    _server.cache_clear()


def start_server_early(device: str) -> None:
    """Start the server if a job with run.device `device` seems to need it, found out without torch.

    A command that launches ranks calls this first, so that the server and the command load torch at the same time.
    """
    if device == "cpu" or (device == "auto" and not any(Path(driver).exists() for driver in _GPU_DRIVERS)):
        start_server()
