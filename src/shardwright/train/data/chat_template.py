"""Chats as the text that a model is trained on: a Jinja template writes it, and says or shows where the answers are.

Templates come with tokenizers, from strangers. They are run in Jinja's sandbox, with nothing to call but what is given
here, in a process of its own that has so much time and memory (encoding_process.py). They are not told the time: tokens
are a function of the data. Those that write a date (strftime_now) are told that of data.today.

Where a template marks what the assistant says ({% generation %} ... {% endgeneration %}), that is what is learned. Else
an answer is what it adds: from the end of what comes before, with the prompt for an answer behind that, to its own end.
A template may show an earlier turn otherwise once there are later ones (thoughts are left out, for example); then that
answer is not where it would be looked for, has no loss, and is counted. Each answer that is looked for is up to three
more texts, so what that costs grows with the square of a chat's length. It is bounded by what is written, not by the
time that it takes: which answers are learned is a function of the data, too.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from shardwright.train.data.chat_rows import ASSISTANT, Chat
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.template_sandbox import UnsafeJinjaError, template_sandbox

# What may be written to look for the answers of a chat, in characters. To begin a message takes as long as a thousand
# of them. That is 1,100 answers of a sentence, or 650 of 2,000 characters; those behind them have no loss.
MOST_WORK = 4_000_000_000
_MESSAGE_WORK = 1000


class TemplateError(ValueError):
    """A fault of a template, or of a chat for it, in one sentence."""


class LateError(TemplateError):
    """A template that takes too long."""


class NoDateError(TemplateError):
    """A template that writes a date, and is told none."""


@dataclass(frozen=True)
class WrittenChat:
    """The text of a chat, and the ranges of its characters that are learned, ascending. Of so many answers some could
    not be told from what is around them."""

    text: str
    answers: tuple[tuple[int, int], ...]
    num_answers: int

    @property
    def num_lost(self) -> int:
        """Answers that have no loss."""
        return self.num_answers - len(self.answers)


class ChatTemplate:
    """A template, ready to write chats with."""

    def __init__(self, files: TemplateFiles, today: str = "") -> None:
        """A template that is told which day it is, such as 2026-07-26, or nothing of it. Raises TemplateError."""
        from jinja2 import TemplateError as JinjaError

        try:
            environment = template_sandbox([_generation_tag(), "jinja2.ext.loopcontrols"], {"tojson": _to_json})
        except UnsafeJinjaError as error:
            raise TemplateError(str(error)) from None
        environment.globals["raise_exception"] = _refuse
        if today:  # without, templates that ask whether it is defined have a date of their own
            environment.globals["strftime_now"] = datetime.fromisoformat(today).strftime
        self._path = files.path
        # Nobody who writes a chat can guess them and mark a text of his own.
        self._begin, self._end = (f"\ue000{secrets.token_hex(16)}{kind}\ue000" for kind in ("begin", "end"))
        environment.globals["_mark_answer"] = partial(_marked, self._begin, self._end)
        self._marks = re.compile(f"{self._begin}|{self._end}")
        self._special = files.special
        self._is_marking = re.search(r"\{%-?\s*generation\s*-?%\}", files.text) is not None
        try:
            self._template = environment.from_string(files.text)
        except JinjaError as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise TemplateError(
                f"the chat template of {files.path} is broken: {error}{where}; mend it, or name another in "
                "data.chat_template"
            ) from None
        except LateError:
            raise
        except (ValueError, RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            raise TemplateError(
                f"the chat template of {files.path} is broken: {_reason(error)}; name another in data.chat_template"
            ) from None

    def write(self, chat: Chat) -> WrittenChat:
        """The chat as text. Raises TemplateError."""
        messages, told = list(chat.messages), dict(chat.told or {})
        raw = self._render(chat, messages, told, asks=chat.asks)
        learned = [i for i in range(chat.first_learned, len(messages)) if messages[i]["role"] == ASSISTANT]
        if self._is_marking:
            text, answers = self._without_marks(raw, chat)
            if chat.first_learned:
                before = self._render(chat, messages[: chat.first_learned], told)
                answers = answers[before.count(self._begin) :]
            return WrittenChat(text, tuple(answers), max(len(learned), len(answers)))
        parts = _Parts(lambda number, asks: self._render(chat, messages[:number], told, asks), raw, len(messages))
        return WrittenChat(raw, tuple(_places(parts, learned)), len(learned))

    def _render(self, chat: Chat, messages: list[dict[str, Any]], told: dict[str, Any], asks: bool = False) -> str:
        try:
            fields = self._special | told | {"messages": messages, "add_generation_prompt": asks}
            text = self._template.render(**fields)
            text.encode()
        except LateError:
            raise
        # A template is a program: whatever goes wrong in it is said of it.
        except Exception as error:
            if _wants_date(error):
                raise NoDateError(
                    f"the chat template of {self._path} writes the date of the day (strftime_now), and tokens may not "
                    'change from day to day; say a date, such as data.today = "2026-07-26"'
                ) from None
            raise TemplateError(
                f"{chat.where}: the chat template refuses it: {_reason(error)}; mend that chat, drop it, or name "
                "another template in data.chat_template"
            ) from None
        return text

    def _without_marks(self, raw: str, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        parts, answers, length, begin = [], [], 0, -1
        position = 0
        for mark in self._marks.finditer(raw):
            parts.append(raw[position : mark.start()])
            length += len(parts[-1])
            position = mark.end()
            if mark[0] == self._begin and begin < 0:
                begin = length
            elif mark[0] == self._end and begin >= 0:
                answers += [(begin, length)] if length > begin else []
                begin = -1
            else:
                raise TemplateError(
                    f"{chat.where}: the chat template has a generation mark within another; mend it, or name another "
                    "in data.chat_template"
                )
        return "".join([*parts, raw[position:]]), answers


class _Parts:
    """The texts of the first messages of a chat beside that of all, and what it has cost to write them."""

    def __init__(self, render: Callable[[int, bool], str], whole: str, num_messages: int) -> None:
        self.whole, self.work = whole, 0
        self._render, self._num_messages = render, num_messages
        self._kept = 0, ""

    def text(self, number: int, asks: bool = False) -> str:
        """The text of the first so many messages, with what asks for an answer or without. Raises TemplateError."""
        if number == self._num_messages:
            return self.whole
        if number and number == self._kept[0] and not asks:
            return self._kept[1]
        self.work += _MESSAGE_WORK * number
        written = self._render(number, asks)
        self.work += len(written)
        if not asks:  # where an answer follows another, the end of one is the beginning of the next
            self._kept = number, written
        return written

    def place(self, i: int) -> tuple[int, int] | None:
        """Where message i stands in the whole text; None where it can't be told."""
        whole = self.whole
        try:
            before = self.text(i)
            if not whole.startswith(before):
                return None
            after = self.text(i + 1)
            if not (len(before) < len(after) and whole.startswith(after)):
                return None
            asked = self.text(i, asks=True)
        except (LateError, NoDateError):
            raise
        except TemplateError:  # it refuses what is cut off there
            return None
        # What asks for an answer may have more than stands before one that is given.
        begin = _num_common(asked, whole)
        return (begin, len(after)) if len(before) <= begin < len(after) else None


def _places(parts: _Parts, learned: list[int]) -> Iterator[tuple[int, int]]:
    """Where these messages stand that can be told, as far as there is time to look for them."""
    for i in learned:
        if parts.work > MOST_WORK:
            return
        if place := parts.place(i):
            yield place


def work_of(chat: Chat) -> int:
    """About what it takes to look for the answers of a chat, in characters that are written."""
    num_answers = sum(message["role"] == ASSISTANT for message in chat.messages)
    return min(MOST_WORK, 3 * num_answers * (chat.num_characters + _MESSAGE_WORK * len(chat.messages)) // 2)


def _num_common(first: str, second: str) -> int:
    """How many characters two texts begin with alike. Blocks are compared at once, and one of them by halves."""
    low, size = 0, 1 << 16
    most = min(len(first), len(second))
    while size:
        while low + size <= most and second.startswith(first[low : low + size], low):
            low += size
        size //= 2
    return low


def _generation_tag() -> type:
    """The tag that stands around what the assistant says."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Puts marks around what it holds."""

        tags = {"generation"}  # noqa: RUF012 (as the library has it)

        def parse(self, parser: Any) -> Any:
            """The tag's body, given to what marks it."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = nodes.Call(nodes.Name("_mark_answer", "load"), [], [], None, None)
            return nodes.CallBlock(mark, [], [], body).set_lineno(line)

    return Generation


def _wants_date(error: Exception) -> bool:
    from jinja2 import UndefinedError

    return isinstance(error, UndefinedError) and "'strftime_now' is undefined" in str(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it takes more memory than there is for a chat"
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def _marked(begin: str, end: str, caller: Any) -> str:
    return f"{begin}{caller()}{end}"


def _refuse(message: object) -> None:
    """The function that templates call to refuse a chat."""
    raise ValueError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without what HTML needs, as templates expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
