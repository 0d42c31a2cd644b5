"""A process that encodes batches for another: it reads them from its standard input, and ends when that is closed.

A chat template and a tokenizer file are programs of strangers. They get CPU time and memory in proportion to the length
of a text. If they take more, the batch ends with an error message, or the process is killed. Messages between the two
processes are fields as JSON, followed by arrays as raw bytes.
"""

import json
import math
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError, error_text, faults_in
from shardwright.config.data import DataSpec
from shardwright.config.phrase import as_data, say
from shardwright.config.units import MIB
from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, LateError, WrittenChat, work_of
from shardwright.train.data.encoding import ARRAYS, EncodingError, HereEncoder
from shardwright.train.data.memory_limit import limit_memory, virtual_bytes
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.tokenizer import load_tokenizer

# A template takes milliseconds. Code inside a library can't be interrupted; the system kills the process a second or
# two later. Locating the answers of a long chat gets more time, in proportion to its work: some ten times what a fast
# machine takes.
CHAT_S = 2
_WORK_S = 5e-9
_BY_TICKS = ~0 << 3  # Linux's number of this process's clock CPUCLOCK_PROF, with which its limits are compared
# A tokenizer takes 1 to 4 microseconds and 200 to 1,050 bytes for each character: most for texts of one character.
_CHARACTER_S = 5e-5
_CHARACTER_BYTES = 1536
BATCH_MEMORY_MIB = 384  # beside the memory of the process after its start


@dataclass(frozen=True)
class EncodingSetup:
    """The setup of a process that encodes."""

    data: DataSpec
    template: TemplateFiles | None

    def as_fields(self) -> dict[str, Any]:
        """The setup as fields of JSON, which `of_fields` reads."""
        files = self.template
        template = None if files is None else {"text": files.text, "path": str(files.path), "special": files.special}
        return {"data": self.data.model_dump(mode="json"), "template": template}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "EncodingSetup":
        """Read the fields that `as_fields` wrote."""
        template_fields = fields["template"]
        template = template_fields and TemplateFiles(
            template_fields["text"], Path(template_fields["path"]), template_fields["special"]
        )
        return cls(DataSpec.model_validate_json(json.dumps(fields["data"])), template)


class BoundedTemplate(ChatTemplate):
    """A chat template with a limit on CPU time for each chat."""

    def write(self, chat: Chat) -> WrittenChat:
        with bounded(
            CHAT_S + _WORK_S * work_of(chat), say("{where}: the chat template", where=chat.where), _OTHER_TEMPLATE
        ):
            return super().write(chat)


_OTHER_TEMPLATE = say("drop that chat, or name another template in data.chat_template")


class BoundedEncoder(HereEncoder):
    """An encoder whose tokenizer has a limit on CPU time for each call."""

    def ids_of(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        with self._bounded(texts):
            return super().ids_of(texts)

    def places_of(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._bounded([text]):
            return super().places_of(text)

    def _bounded(self, texts: Sequence[str]) -> AbstractContextManager[None]:
        num_characters = sum(map(len, texts))
        subject = say("the tokenizer of data.tokenizer, for {count:,} characters,", count=num_characters)
        return bounded(CHAT_S + _CHARACTER_S * num_characters, subject, _OTHER_TOKENIZER)


_OTHER_TOKENIZER = say("name another tokenizer")


def serve() -> None:
    """Answer requests from the standard input until it ends: a setup, then batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent process
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # output that a library prints must not get into an answer
    if (request := receive(requests)) is None:
        return
    setup = EncodingSetup.of_fields(request[0])
    try:
        tokenizer, template = load_tokenizer(setup.data), None
        begun_bytes = virtual_bytes()
        if setup.template is not None:
            _bound_memory(begun_bytes, 0)
            subject = say("the chat template {path}", path=str(setup.template.path))
            with bounded(CHAT_S, subject, say("name another in data.chat_template")):
                template = BoundedTemplate(setup.template, setup.data.today)
        encoder = BoundedEncoder(tokenizer, template, setup.data.begin_token == "always")
    except (PlanError, ValueError) as error:
        send(answers, {"faults": list(map(as_data, faults_in(error)))})
        return
    send(answers, {})
    while (request := receive(requests)) is not None:
        items = [item if isinstance(item, str) else Chat(**item) for item in request[0]["items"]]
        num_characters = sum(len(item) if isinstance(item, str) else item.num_characters for item in items)
        _bound_memory(begun_bytes, num_characters)
        try:
            encoded = encoder.encode(items)
        except (EncodingError, LateError) as error:
            send(answers, {"faults": [as_data(error_text(error))]})
        except MemoryError:
            most_mib = BATCH_MEMORY_MIB + num_characters * _CHARACTER_BYTES // MIB
            fault = say(
                "{count:,} characters of text take more than {most:,} MiB to be made tokens; name another tokenizer in "
                "data.tokenizer, or cut longer documents",
                count=num_characters,
                most=most_mib,
            )
            send(answers, {"faults": [as_data(fault)]})
        else:
            fields = {name: value for name, value in vars(encoded).items() if name not in ARRAYS}
            send(answers, fields, [getattr(encoded, name) for name in ARRAYS])


def _bound_memory(begun_bytes: int, num_characters: int) -> None:
    """Limit the memory of this process to `begun_bytes`, its memory after the start, and more for a text of
    `num_characters`. No limit if `begun_bytes` is 0, which means unknown."""
    if begun_bytes:
        limit_memory(begun_bytes + BATCH_MEMORY_MIB * MIB + num_characters * _CHARACTER_BYTES)


def _counted_s() -> float:
    """The CPU seconds of this process as its limit counts them. Linux counts by ticks, which can be a tenth more than a
    process used: one that has encoded for minutes would be killed at once by a limit from the time that it used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    counted_s = used.ru_utime + used.ru_stime
    with suppress(AttributeError, OSError):
        counted_s = max(counted_s, time.clock_gettime(_BY_TICKS))
    return counted_s


@contextmanager
def bounded(most_s: float, subject: str, way_out: str) -> Iterator[None]:
    """Limit the CPU time of the block to `most_s` seconds. Raises LateError if `subject` takes more; the message ends
    with `way_out`. Code that can't be interrupted is killed by the system."""

    def late(*_: object) -> None:
        fault = say("{subject} takes more than {most:.3g} s; {way_out}", subject=subject, most=most_s, way_out=way_out)
        raise LateError(fault)

    hard_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft_s = math.ceil(_counted_s() + most_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft_s if hard_s < 0 else min(soft_s, hard_s), hard_s))
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, most_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard_s, hard_s))


# Messages. No received data is executed, as a pickle would be: the process at one end runs a stranger's template.

_LENGTH = struct.Struct("<Q")


class BrokenMessageError(ValueError):
    """A message is incomplete or invalid."""


def send(stream: IO[bytes], fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
    """Write a message. Raises OSError if the other end is closed."""
    described = [[array.dtype.str, len(array)] for array in arrays]
    raw = json.dumps({"fields": fields, "arrays": described}, default=str).encode()
    stream.write(_LENGTH.pack(len(raw)) + raw)
    for array in arrays:
        stream.write(array.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[NDArray[Any]]] | None:
    """Read a message; None if the other end is closed. Raises BrokenMessageError or OSError."""
    length = stream.read(_LENGTH.size)
    if not length:
        return None
    try:
        header = json.loads(_read_exactly(stream, _LENGTH.unpack(length)[0]))
        arrays = [
            np.frombuffer(_read_exactly(stream, np.dtype(dtype).itemsize * size), dtype)
            for dtype, size in header["arrays"]
        ]
        return header["fields"], arrays
    except (ValueError, TypeError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise BrokenMessageError(str(error)) from None


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    raw = stream.read(size)
    if len(raw) != size:
        raise BrokenMessageError(say("{count} bytes came of {size}", count=len(raw), size=size))
    return raw
