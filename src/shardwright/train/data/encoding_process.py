"""A process that encodes batches for another: it reads them from its standard input, and ends where that does.

A chat template is a stranger's program: for each chat it has so much time of the processor and memory, and what takes
more ends the batch with a sentence, or the process.
"""

import json
import math
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.units import GIB
from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, LateError, WrittenChat, work_of
from shardwright.train.data.encoding import ARRAYS, EncodingError, HereEncoder
from shardwright.train.data.encoding_messages import receive, send
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.tokenizer import load_tokenizer

# A template takes milliseconds. One that is in the library's hands can't be interrupted, only ended: after twice that.
# What the answers of a long chat are looked for with is more, in proportion: some ten times what a fast machine takes.
CHAT_S = 5
_WORK_S = 5e-9
CHAT_MEMORY_GIB = 1


@dataclass(frozen=True)
class EncodingSetup:
    """What a process encodes with."""

    data: DataSpec
    template: TemplateFiles | None

    def as_fields(self) -> dict[str, Any]:
        """To be read by `of_fields`."""
        found = self.template
        written = None if found is None else {"text": found.text, "path": str(found.path), "special": found.special}
        return {"data": self.data.model_dump(mode="json"), "template": written}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "EncodingSetup":
        """What `as_fields` wrote."""
        written = fields["template"]
        template = written and TemplateFiles(written["text"], Path(written["path"]), written["special"])
        return cls(DataSpec.model_validate_json(json.dumps(fields["data"])), template)


class BoundedTemplate(ChatTemplate):
    """A template that has so much time for a chat."""

    def write(self, chat: Chat) -> WrittenChat:
        with bounded(chat.where, CHAT_S + _WORK_S * work_of(chat)):
            return super().write(chat)


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
        if setup.template is not None:
            _bound_memory()
            with bounded(str(setup.template.path), CHAT_S):
                template = BoundedTemplate(setup.template, setup.data.today)
        encoder = HereEncoder(tokenizer, template)
    except (PlanError, ValueError) as error:
        send(answers, {"faults": error.faults if isinstance(error, PlanError) else [str(error)]})
        return
    send(answers, {})
    while (asked := receive(requests)) is not None:
        items = [item if isinstance(item, str) else Chat(**item) for item in asked[0]["items"]]
        try:
            encoded = encoder.encode(items)
        except EncodingError as error:
            send(answers, {"faults": [str(error)]})
        else:
            fields = {name: value for name, value in vars(encoded).items() if name not in ARRAYS}
            send(answers, fields, [getattr(encoded, name) for name in ARRAYS])


def _bound_memory() -> None:
    """So much memory beside what the process has now."""
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())) if _IS_LINUX else {}
    if "VmSize" in sizes:
        most, hard = 1024 * int(sizes["VmSize"]) + CHAT_MEMORY_GIB * GIB, resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


_IS_LINUX = sys.platform == "linux"


@contextmanager
def bounded(where: str, most_s: float) -> Iterator[None]:
    """So much time of the processor. LateError where it is over."""

    def late(*_: object) -> None:
        raise LateError(
            f"{where}: the chat template takes more than {most_s:.3g} s for it; drop that chat, or name another "
            "template in data.chat_template"
        )

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = math.ceil(used.ru_utime + used.ru_stime + 2 * most_s)
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard < 0 else min(most, hard), hard))
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, most_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
