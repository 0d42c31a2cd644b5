"""The processes of the local ranks and a connection to each: forked from the server, or spawned if that can't be."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from shardwright.config.phrase import say
from shardwright.train.launch.ending import die_of_signals, held_back
from shardwright.train.launch.fork_server import ForkedRank, ServerEndedError, end_server, start_server
from shardwright.train.launch.forking import Run, follow, serve_rank

# A server that has not forked its ranks in this time is stopped, or its machine is too busy. It includes loading torch.
START_S = 180.0
# A rank that has closed its connection ends within this time, or never.
CLOSING_S = 3.0


class RankProcesses(Protocol):
    """The processes of local ranks, numbered from 0."""

    connections: "list[Connection[Any, Any]]"

    def start(self, runs: Sequence[Run]) -> None:
        """Start a process for each of `runs`, and send it that function. Raises ServerEndedError."""

    def status(self, rank: int) -> int | None:
        """The status of a rank that closed its connection: an exit status, or the negative number of a signal; None if
        unknown. Raises ServerEndedError."""

    def send(self, number: int) -> None:
        """Send a signal to all running ranks."""

    def end(self) -> None:
        """Kill all running ranks."""


class ForkedRanks:
    """Ranks that are forked from the server."""

    def __init__(self, is_preemptible: bool) -> None:
        self._is_preemptible = is_preemptible
        self.connections: list[Connection[Any, Any]] = []
        self._server = start_server()
        self._ranks: list[ForkedRank] = []

    def start(self, runs: Sequence[Run]) -> None:
        for _ in runs:
            connection, rank_end = multiprocessing.Pipe()
            self.connections.append(connection)
            with rank_end:
                self._ranks.append(self._server.fork(rank_end.fileno(), self._is_preemptible))
        if not self._listen_until(lambda: all(rank.pid for rank in self._ranks), START_S):
            raise ServerEndedError(
                say(
                    "the server that ranks are forked from has not answered for {seconds:.0f} s: it is stopped, or "
                    "this machine is too busy",
                    seconds=START_S,
                )
            )
        for connection, run in zip(self.connections, runs, strict=True):
            with suppress(BrokenPipeError, ConnectionResetError):  # the rank has ended, which `status` will tell
                connection.send(run)

    def status(self, rank: int) -> int | None:
        self._listen_until(lambda: self._ranks[rank].status is not None, CLOSING_S)
        return self._ranks[rank].status

    def send(self, number: int) -> None:
        for rank in self._ranks:
            rank.send(number)

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        self.send(signal.SIGKILL)
        try:
            is_over = all(rank.pid for rank in self._ranks) and self._listen_until(
                lambda: not any(rank.is_running() for rank in self._ranks), CLOSING_S
            )
        except ServerEndedError:
            is_over = False
        if not is_over:  # the server is stopped, or has not forked all ranks
            end_server()

    def _listen_until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Receive reports of the server until a condition is true. False if it is not in time."""
        late_s = time.monotonic() + within_s
        while not condition():
            if not wait([self._server.fileno()], max(0.0, late_s - time.monotonic())):
                return False
            self._server.listen()
        return True


class SpawnedRanks:
    """Ranks that are started as new interpreters by this process."""

    def __init__(self) -> None:
        self.connections: list[Connection[Any, Any]] = []
        self._processes: list[BaseProcess] = []

    def start(self, runs: Sequence[Run]) -> None:
        context = multiprocessing.get_context("spawn")
        for run in runs:
            connection, rank_end = multiprocessing.Pipe()
            self.connections.append(connection)
            with rank_end, held_back():
                process = context.Process(target=_spawned_rank, args=(rank_end, os.getpid()))
                process.start()
                self._processes.append(process)
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.send(run)

    def status(self, rank: int) -> int | None:
        self._processes[rank].join(CLOSING_S)
        return self._processes[rank].exitcode

    def send(self, number: int) -> None:
        for process in self._processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, number)

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _spawned_rank(connection: "Connection[Any, Any]", launcher: int) -> None:
    die_of_signals()
    if not follow(launcher, signal.SIGKILL):
        sys.exit(1)
    sys.exit(serve_rank(connection))
