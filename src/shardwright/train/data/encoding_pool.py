"""Processes that encode batches in parallel. Results are used in the order of the batches, so the tokens do not depend
on the number of processes. A thread of this process waits for each of them.
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

from shardwright.config.base import PlanError, RunError, error_text, shortened
from shardwright.config.phrase import Phrase, both, of_data, say
from shardwright.config.units import ending_phrase
from shardwright.train.data.encoding import ARRAYS, Encoded, Encoder, EncodingError, HereEncoder, Item
from shardwright.train.data.encoding_process import (
    BATCH_MEMORY_MIB,
    CHAT_S,
    BrokenMessageError,
    EncodingSetup,
    receive,
    send,
)
from shardwright.train.data.tokenizer import Tokenizer

_MAIN = "import sys; sys.path[:] = {path!r}\nfrom shardwright.train.data.encoding_process import serve\nserve()"


def encoders(setup: EncodingSetup, tokenizer: Tokenizer, num_bytes: int) -> "EncodingPool | HereAndNow":
    """The encoders for `num_bytes` of files: up to data.workers processes, or this process if that is as fast."""
    workers = setup.data.workers or _num_cores()
    # A chat template or a tokenizer file from a stranger runs only in separate processes, which have limits.
    is_strange = setup.data.chats or setup.data.tokenizer != "bytes"
    if is_strange or (workers > 1 and num_bytes >= _BYTES_PER_PROCESS):
        return EncodingPool(setup, max(1, min(workers, num_bytes // _BYTES_PER_PROCESS + 1)))
    return HereAndNow(HereEncoder(tokenizer, None))


# A process starts in some tenths of a second, in which another encodes about this many bytes.
_BYTES_PER_PROCESS = 4 << 20


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HereAndNow:
    """Encodes batches in this process, one after the other: for the tokenizer "bytes"."""

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
            future.set_exception(PlanError("data", [error_text(error)]))
        return future


class EncodingPool:
    """Encodes batches in separate processes, several at once."""

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
    """A process's task in words, for the message if it ends early: the process at its task, and a hint."""

    process: str
    hint: str

    def end_message(self, status: str) -> Phrase:
        """The message about a process that has ended with `status`."""
        return say("{process} has ended ({status}): {hint}", process=self.process, status=status, hint=self.hint)


class _Process:
    """One process. It is started at once, and gets its setup with the first batch."""

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
        """Encode a batch. Raises PlanError, or RunError if the process has ended."""
        if self._setup is not None:
            setup, self._setup = self._setup, None
            self._ask(setup.as_fields(), _setup_purpose(setup))
        request = {"items": [item if isinstance(item, str) else vars(item) for item in items]}
        fields, arrays = self._ask(request, _batch_purpose(items))
        return Encoded(**dict(zip(ARRAYS, arrays, strict=True)), **fields)

    def _ask(self, request: dict[str, Any], purpose: _Purpose) -> tuple[dict[str, Any], list[Any]]:
        """The answer to a request: fields and arrays. Raises PlanError, or RunError with the purpose if the process has
        ended."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            send(requests, request)
            answer = receive(answers)
            faults = [of_data(fault) for fault in answer[0].get("faults", ())] if answer else []
        except (OSError, ValueError, BrokenMessageError):
            answer, faults = None, []
        if answer is None:
            self._process.kill()  # if it still runs, and only its answer was broken
            status = self._process.wait()
            raise RunError(purpose.end_message(ending_phrase(status, "" if status < 0 else self._last_words())))
        if faults:
            raise PlanError("data", faults)
        return answer

    def _last_words(self) -> str:
        """The last line of its standard error, which tells why Python ended; "" if there is none."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 1000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {shortened(lines[-1], 200)}" if lines else ""

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()

    def wait(self) -> None:
        """Wait for the end of the process, and close its files."""
        self._process.wait()
        self._errors.close()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # the process has not read all of its input
                stream.close()


def _setup_purpose(setup: EncodingSetup) -> _Purpose:
    """The purpose of a process that reads its tokenizer and template."""
    files: tuple[str, ...] = (setup.data.tokenizer,)
    if setup.template is not None:
        files = (setup.data.tokenizer, say("the chat template {path}", path=str(setup.template.path)))
    process = say("a process that turns text into tokens, while it read {files},", files=both(files))
    hint = say("to read them it may take {mib} MiB and {seconds} s; name others", mib=BATCH_MEMORY_MIB, seconds=CHAT_S)
    return _Purpose(process, hint)


def _batch_purpose(items: Sequence[Item]) -> _Purpose:
    """The purpose of a process that encodes a batch."""
    first_item = items[0] if items else ""
    if isinstance(first_item, str):
        hint = say(
            "a text may take {mib} MiB and {seconds} s of the processor, and more in proportion to its length; name "
            "another tokenizer, or where memory is short use fewer by data.workers",
            mib=BATCH_MEMORY_MIB,
            seconds=CHAT_S,
        )
        return _Purpose(say("a process that turns text into tokens"), hint)
    hint = say(
        "a chat may take {mib} MiB and {seconds} s of the processor, and more in proportion to its length; drop it, or "
        "name another template in data.chat_template",
        mib=BATCH_MEMORY_MIB,
        seconds=CHAT_S,
    )
    return _Purpose(say("a process that writes chats, in those from {where} on,", where=first_item.where), hint)


# Variables that Python and its libraries need. Others may be secrets, and the process runs a stranger's template.
_PASSED = re.compile(r"PATH|HOME|TMPDIR|LANG|LC_\w+|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w+|OMP_NUM_THREADS")


def _environment() -> dict[str, str]:
    """The environment variables of a process that encodes."""
    passed = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    return passed | {"TOKENIZERS_PARALLELISM": "false"}  # there are as many processes as cores
