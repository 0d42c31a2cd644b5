"""A process that encodes batches for another: it reads them from its standard input, and ends where that does.

A chat template and a tokenizer's file are a stranger's programs: for a text they have so much time of the processor
and memory, in proportion to its length, and what takes more ends the batch with a sentence, or the process.
"""

import json
import math
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError, faults_in
from shardwright.config.data import DataSpec
from shardwright.config.units import MIB
from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, LateError, WrittenChat, work_of
from shardwright.train.data.encoding import ARRAYS, EncodingError, HereEncoder
from shardwright.train.data.encoding_messages import receive, send
from shardwright.train.data.memory_limit import limit_memory, virtual_bytes
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.tokenizer import load_tokenizer

# A template takes milliseconds. What is in a library's hands can't be interrupted, only ended: a second or two later.
# What the answers of a long chat are looked for with is more, in proportion: some ten times what a fast machine takes.
CHAT_S = 2
_WORK_S = 5e-9
# A tokenizer takes 1 to 4 microseconds a character, and 200 to 1,050 bytes: most for texts of one character each.
_CHARACTER_S = 5e-5
_CHARACTER_BYTES = 1536
BATCH_MEMORY_MIB = 384  # beside what the process has once it has begun


@dataclass(frozen=True)
class EncodingSetup:
    """The setup of a process that encodes."""

    data: DataSpec
    template: TemplateFiles | None

    def as_fields(self) -> dict[str, Any]:
        """To be read by `of_fields`."""
        found = self.template
        written = None if found is None else {"text": found.text, "path": str(found.path), "special": found.special}
        return {"data": self.data.model_dump(mode="json"), "template": written}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "EncodingSetup":
        """Read the fields that `as_fields` wrote."""
        written = fields["template"]
        template = written and TemplateFiles(written["text"], Path(written["path"]), written["special"])
        return cls(DataSpec.model_validate_json(json.dumps(fields["data"])), template)


class BoundedTemplate(ChatTemplate):
    """A template that has so much time for a chat."""

    def write(self, chat: Chat) -> WrittenChat:
        with bounded(CHAT_S + _WORK_S * work_of(chat), f"{chat.where}: the chat template", _OTHER_TEMPLATE):
            return super().write(chat)


_OTHER_TEMPLATE = "drop that chat, or name another template in data.chat_template"


class BoundedEncoder(HereEncoder):
    """An encoder whose tokenizer has so much time for the texts of a call."""

    def ids_of(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        with self._bounded(texts):
            return super().ids_of(texts)

    def places_of(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._bounded([text]):
            return super().places_of(text)

    def _bounded(self, texts: Sequence[str]) -> AbstractContextManager[None]:
        num_characters = sum(map(len, texts))
        what = f"the tokenizer of data.tokenizer, for {num_characters:,} characters,"
        return bounded(CHAT_S + _CHARACTER_S * num_characters, what, "name another tokenizer")


def serve() -> None:
    """Answer what comes on the standard input until it ends: a setup, then batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, it is for the process that asks
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a library that prints must not print into an answer
    if (asked := receive(requests)) is None:
        return
    setup = EncodingSetup.of_fields(asked[0])
    try:
        tokenizer, template = load_tokenizer(setup.data), None
        begun_bytes = virtual_bytes()
        if setup.template is not None:
            _bound_memory(begun_bytes, 0)
            with bounded(CHAT_S, f"the chat template {setup.template.path}", "name another in data.chat_template"):
                template = BoundedTemplate(setup.template, setup.data.today)
        encoder = BoundedEncoder(tokenizer, template, setup.data.begin_token == "always")
    except (PlanError, ValueError) as error:
        send(answers, {"faults": faults_in(error)})
        return
    send(answers, {})
    while (asked := receive(requests)) is not None:
        items = [item if isinstance(item, str) else Chat(**item) for item in asked[0]["items"]]
        num_characters = sum(len(item) if isinstance(item, str) else item.num_characters for item in items)
        _bound_memory(begun_bytes, num_characters)
        try:
            encoded = encoder.encode(items)
        except (EncodingError, LateError) as error:
            send(answers, {"faults": [str(error)]})
        except MemoryError:
            most_mib = BATCH_MEMORY_MIB + num_characters * _CHARACTER_BYTES // MIB
            told = f"{num_characters:,} characters of text take more than {most_mib:,} MiB to be made tokens"
            send(answers, {"faults": [f"{told}; name another tokenizer in data.tokenizer, or cut longer documents"]})
        else:
            fields = {name: value for name, value in vars(encoded).items() if name not in ARRAYS}
            send(answers, fields, [getattr(encoded, name) for name in ARRAYS])


def _bound_memory(begun_bytes: int, num_characters: int) -> None:
    """So much memory for a text of so many characters, beside what the process had when it began."""
    if begun_bytes:
        limit_memory(begun_bytes + BATCH_MEMORY_MIB * MIB + num_characters * _CHARACTER_BYTES)


@contextmanager
def bounded(most_s: float, what: str, way_out: str) -> Iterator[None]:
    """So much time of the processor. LateError where it is over: `what` takes more, and there is a way out."""

    def late(*_: object) -> None:
        raise LateError(f"{what} takes more than {most_s:.3g} s; {way_out}")

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = math.ceil(used.ru_utime + used.ru_stime + most_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard < 0 else min(most, hard), hard))
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, most_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
