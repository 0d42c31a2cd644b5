"""Processes that encode batches beside each other, whose results come in the order of the batches.

So what is written does not depend on how many there are. Each has a thread here that waits for it.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Self

from shardwright.config.base import PlanError, RunError, shortened
from shardwright.train.data.encoding import ARRAYS, Encoded, Encoder, EncodingError, HereEncoder, Item
from shardwright.train.data.encoding_messages import BrokenMessageError, receive, send
from shardwright.train.data.encoding_process import BATCH_MEMORY_MIB, CHAT_S, EncodingSetup
from shardwright.train.data.tokenizer import Tokenizer

_MAIN = "import sys; sys.path[:] = {path!r}\nfrom shardwright.train.data.encoding_process import serve\nserve()"


def encoders(setup: EncodingSetup, tokenizer: Tokenizer, num_bytes: int) -> "EncodingPool | HereAndNow":
    """The encoders for so many bytes of files: processes, as many as data.workers says, if that pays."""
    workers = setup.data.workers or _num_cores()
    # A chat template and a tokenizer's file are a stranger's: their processes have limits, and this one has none.
    is_strange = setup.data.chats or setup.data.tokenizer != "bytes"
    if is_strange or (workers > 1 and num_bytes >= _PAYS_BYTES):
        return EncodingPool(setup, max(1, min(workers, num_bytes // _PAYS_BYTES + 1)))
    return HereAndNow(HereEncoder(tokenizer, None))


# To start a process takes some tenths of a second, in which one encodes about so much.
_PAYS_BYTES = 4 << 20


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HereAndNow:
    """Encodes batches in this process, one after the other: for text as bytes."""

    num_ahead = 0
    batch_characters = 4 << 20

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, items: Sequence[Item]) -> "Future[Encoded]":
        """A future of an encoded batch, which may raise PlanError."""
        future: Future[Encoded] = Future()
        try:
            future.set_result(self._encoder.encode(items))
        except EncodingError as error:
            future.set_exception(PlanError("data", [str(error)]))
        return future


class EncodingPool:
    """Encodes batches in processes of their own, several at once."""

    batch_characters = 1 << 20

    def __init__(self, setup: EncodingSetup, num_processes: int) -> None:
        self.num_ahead = 2 * num_processes
        self._free: SimpleQueue[_Process] = SimpleQueue()
        self._all = [_Process(setup) for _ in range(num_processes)]
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="encoding")
        for process in self._all:
            self._free.put(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.end()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.wait()

    def submit(self, items: Sequence[Item]) -> "Future[Encoded]":
        """A future of an encoded batch, which may raise PlanError, or RunError if a process has ended."""
        return self._threads.submit(self._encode, list(items))

    def _encode(self, items: list[Item]) -> Encoded:
        process = self._free.get()
        try:
            return process.encode(items)
        finally:
            self._free.put(process)


@dataclass(frozen=True)
class _Purpose:
    """A process's task in words, for where it ends before it is done: `what` it does, `where` it was, and a hint."""

    what: str
    where: str
    hint: str

    def obituary(self, ended: str) -> str:
        """The sentence of a process that has ended so."""
        return f"a process that {self.what} has ended ({ended}){self.where}: {self.hint}"


class _Process:
    """One process, which is started at once and told what it encodes with when it is first asked."""

    def __init__(self, setup: EncodingSetup) -> None:
        self._setup: EncodingSetup | None = setup
        # Panics and tracebacks of libraries are not for the user.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the process lives)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
        )

    def encode(self, items: list[Item]) -> Encoded:
        """Raises PlanError, or RunError where the process has ended."""
        if self._setup is not None:
            setup, self._setup = self._setup, None
            self._ask(setup.as_fields(), _beginning(setup))
        asked = {"items": [item if isinstance(item, str) else vars(item) for item in items]}
        fields, arrays = self._ask(asked, _encoding(items))
        return Encoded(**dict(zip(ARRAYS, arrays, strict=True)), **fields)

    def _ask(self, what: dict[str, Any], purpose: _Purpose) -> tuple[dict[str, Any], list[Any]]:
        """The answer to a message. Raises PlanError, or RunError with what the process was at where it has ended."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            send(requests, what)
            found = receive(answers)
        except (OSError, BrokenMessageError):
            found = None
        if found is None:
            self._process.kill()  # where it said what nobody understands
            status = self._process.wait()
            ended = f"signal {-status}" if status < 0 else f"exit status {status}{self._last_words()}"
            raise RunError(purpose.obituary(ended))
        if "faults" in found[0]:
            raise PlanError("data", found[0]["faults"])
        return found

    def _last_words(self) -> str:
        """The last line that it wrote to its standard error, which says why Python ended."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 1000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {shortened(lines[-1], 200)}" if lines else ""

    def end(self) -> None:
        """Have it end, whatever it is at."""
        self._process.kill()

    def wait(self) -> None:
        """Until it has ended, and let go of what was held for it."""
        self._process.wait()
        self._errors.close()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # it has not read what was written to it
                stream.close()


_LIMITS = f"{BATCH_MEMORY_MIB} MiB and {CHAT_S} s of the processor, and more in proportion to its length"


def _beginning(setup: EncodingSetup) -> _Purpose:
    """A process reads a tokenizer and a template."""
    template = f" and the chat template {setup.template.path}" if setup.template is not None else ""
    hint = f"to read them it may take {BATCH_MEMORY_MIB} MiB and {CHAT_S} s; name others"
    return _Purpose("turns text into tokens", f" while it read {setup.data.tokenizer}{template}", hint)


def _encoding(items: Sequence[Item]) -> _Purpose:
    """A process encodes a batch."""
    first = items[0] if items else ""
    if isinstance(first, str):
        hint = f"a text may take {_LIMITS}; name another tokenizer, or where memory is short use fewer by data.workers"
        return _Purpose("turns text into tokens", "", hint)
    hint = f"a chat may take {_LIMITS}; drop it, or name another template in data.chat_template"
    return _Purpose("writes chats", f" in those from {first.where} on", hint)


# A library needs these to be found and to know its language; what else is there may be a secret, and a template of a
# stranger is run in this process.
_PASSED = re.compile(r"PATH|HOME|TMPDIR|LANG|LC_\w+|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w+|OMP_NUM_THREADS")


def _environment() -> dict[str, str]:
    """The environment of a process that encodes."""
    kept = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    return kept | {"TOKENIZERS_PARALLELISM": "false"}  # there are as many processes as cores
