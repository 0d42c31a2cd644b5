"""Commands that begin at once: forked from the server of the tests' ranks, which has loaded torch.

A command that trains loads torch for some seconds, most of the time of a run of a few steps. Here it is forked from a
process that has it, and is from there on what a shell would start: the same code in a process of its own, with its own
session, environment, streams and signals. Its parent is the server.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.ranks import CONTEXT, PATIENCE_S

# Programs: the command `shardwright ARGUMENTS`, a script with the arguments after it, and `torchrun ARGUMENTS`, whose
# ranks are new processes.
SHARDWRIGHT = "from fuzz import preloaded; preloaded.run(sys.argv[1:])"
SCRIPT = """
import os, runpy
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TORCHRUN = "from torch.distributed.run import main; main(sys.argv[1:])"


class ForkedCommand:
    """A forked process, with what tests use of a `subprocess.Popen` whose output and errors are pipes with text."""

    def __init__(
        self, program: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        """Run `program`, the text of a module, with its arguments, environment and folder, in a session of its own."""
        pipes = [os.pipe() for _ in range(2)]
        self._ends = {name: read for name, (read, _) in zip(("out", "err"), pipes, strict=True)}
        self._texts = dict.fromkeys(self._ends, b"")
        streams = [Connection(write, readable=False) for _, write in pipes]
        around = os.environ if environment is None else environment
        told = json.dumps([program, arguments, dict(around)])
        self._process = CONTEXT.Process(target=_be, args=(told, str(folder or Path.cwd()), sys.path, *streams))
        self._process.start()
        for stream in streams:
            stream.close()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def first_error_line(self) -> str:
        """The first line of its errors, or all of them if it ends before."""
        while b"\n" not in self._texts["err"] and (character := os.read(self._ends["err"], 1)):
            self._texts["err"] += character
        return self._texts["err"].decode()

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """Its output and errors up to its end, and that of all that write there. Raises subprocess.TimeoutExpired."""
        late_s, texts = time.monotonic() + timeout, self._texts
        with selectors.DefaultSelector() as selector:
            for name, end in self._ends.items():
                selector.register(end, selectors.EVENT_READ, name)
            while selector.get_map():
                ready = selector.select(max(0.0, late_s - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired("a forked command", timeout)
                for key, _ in ready:
                    chunk = os.read(key.fd, 65536)
                    texts[key.data] += chunk
                    if not chunk:
                        selector.unregister(key.fd)
                        os.close(self._ends.pop(key.data))
        self.wait(max(0.0, late_s - time.monotonic()))
        return texts["out"].decode(), texts["err"].decode()


def run_forked(program: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `program` to its end, as `subprocess.run` would."""
    command = ForkedCommand(program, *arguments, **options)
    try:
        output, errors = command.communicate()
    finally:
        command.kill()
    return subprocess.CompletedProcess(arguments, command.wait(), output, errors)


def _be(told: str, folder: str, path: list[str], out: "Connection[Any, Any]", err: "Connection[Any, Any]") -> None:
    """The life of the process. Never returns."""
    from fuzz import preloaded  # the server has it, and who asks for a command need not load torch

    program, arguments, environment = json.loads(told)

    def life() -> None:
        os.chdir(folder)
        tempfile.tempdir = None  # of its own environment, not of the server's
        sys.path[:] = path
        sys.argv = ["-c", *arguments]
        exec(program, {"__name__": "__main__", "sys": sys})

    with suppress(PermissionError):
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, stream in ((1, out), (2, err)):
        os.dup2(stream.fileno(), descriptor)
    preloaded.live(life)
