"""Chat templates: a Jinja template renders a chat as the text to train on, and the answers are located in that text.

Templates come with tokenizers, from strangers. They run in Jinja's sandbox, with a few functions to call, in a separate
process with limits on time and memory (encoding_process.py). They do not see the clock, since tokens must be a function
of the data: a template that writes a date (strftime_now) gets data.today.

If a template marks answers ({% generation %} ... {% endgeneration %}), the marked text is learned. Else an answer is
located by rendering the chat up to it: it lies between the rendering of the messages before it, with the prompt for an
answer, and the rendering that includes it. A template may render an earlier turn differently once later turns exist
(it drops thoughts, for example). Such an answer can't be located, has no loss, and is counted. Each answer takes up to
three more renderings, so the cost grows with the square of a chat's length. It is bounded by the number of characters
rendered, not by time, so that also the learned answers are a function of the data.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from shardwright.config.base import error_text
from shardwright.config.phrase import say
from shardwright.train.data.chat_rows import ASSISTANT, Chat
from shardwright.train.data.template_files import TemplateFiles
from shardwright.train.data.template_sandbox import UnsafeJinjaError, template_sandbox

# How many characters may be rendered to locate the answers of a chat; a message counts as a thousand more. That is
# enough for 1,100 answers of a sentence, or 650 of 2,000 characters; later ones have no loss.
MOST_WORK = 4_000_000_000
_MESSAGE_WORK = 1000


class TemplateError(ValueError):
    """A fault of a template, or of a chat for it, in one sentence."""


class LateError(TemplateError):
    """A template that takes too long."""


class NoDateError(TemplateError):
    """A template that writes a date, although data.today is not set."""


@dataclass(frozen=True)
class WrittenChat:
    """The text of a chat, and the ranges of its characters that are learned, ascending. `num_answers` also counts
    answers that could not be located."""

    text: str
    answers: tuple[tuple[int, int], ...]
    num_answers: int

    @property
    def num_lost(self) -> int:
        """Answers that have no loss."""
        return self.num_answers - len(self.answers)


class ChatTemplate:
    """A compiled template that renders chats."""

    def __init__(self, files: TemplateFiles, today: str = "") -> None:
        """Compile a template; `today` is the date that it sees, such as 2026-07-26, or empty. Raises TemplateError."""
        from jinja2 import TemplateError as JinjaError

        try:
            environment = template_sandbox([_generation_tag(), "jinja2.ext.loopcontrols"], {"tojson": _to_json})
        except UnsafeJinjaError as error:
            raise TemplateError(error_text(error)) from None
        environment.globals["raise_exception"] = _refuse
        if today:  # else the function stays undefined: some templates check for it and have a default date
            environment.globals["strftime_now"] = datetime.fromisoformat(today).strftime
        self._path = files.path
        # Random marks, so that no chat can contain them.
        self._begin, self._end = (f"\ue000{secrets.token_hex(16)}{kind}\ue000" for kind in ("begin", "end"))
        environment.globals["_mark_answer"] = partial(_marked, self._begin, self._end)
        self._marks = re.compile(f"{self._begin}|{self._end}")
        self._special = files.special
        self._is_marking = re.search(r"\{%-?\s*generation\s*-?%\}", files.text) is not None
        try:
            self._template = environment.from_string(files.text)
        except JinjaError as error:
            reason, line = error_text(error), getattr(error, "lineno", None)
            if line:
                reason = say("{reason} in line {line}", reason=reason, line=line)
            raise TemplateError(
                say(
                    "the chat template of {path} is broken: {reason}; mend it, or name another in data.chat_template",
                    path=files.path,
                    reason=reason,
                )
            ) from None
        except LateError:
            raise
        except (ValueError, RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            raise TemplateError(
                say(
                    "the chat template of {path} is broken: {reason}; name another in data.chat_template",
                    path=files.path,
                    reason=_reason(error),
                )
            ) from None

    def write(self, chat: Chat) -> WrittenChat:
        """The chat as text. Raises TemplateError."""
        messages, template_fields = list(chat.messages), dict(chat.template_fields or {})
        raw = self._render(chat, messages, template_fields, adds_prompt=chat.adds_prompt)
        learned = [i for i in range(chat.first_learned, len(messages)) if messages[i]["role"] == ASSISTANT]
        if self._is_marking:
            text, answers = self._without_marks(raw, chat)
            if chat.first_learned:
                context = self._render(chat, messages[: chat.first_learned], template_fields)
                answers = answers[context.count(self._begin) :]
            return WrittenChat(text, tuple(answers), max(len(learned), len(answers)))
        prefixes = _Prefixes(
            lambda number, adds_prompt: self._render(chat, messages[:number], template_fields, adds_prompt),
            raw,
            len(messages),
        )
        return WrittenChat(raw, tuple(_answer_ranges(prefixes, learned)), len(learned))

    def _render(
        self, chat: Chat, messages: list[dict[str, Any]], template_fields: dict[str, Any], adds_prompt: bool = False
    ) -> str:
        try:
            fields = self._special | template_fields | {"messages": messages, "add_generation_prompt": adds_prompt}
            text = self._template.render(**fields)
            text.encode()
        except LateError:
            raise
        # A template is a program, which may raise anything.
        except Exception as error:
            if _wants_date(error):
                raise NoDateError(
                    say(
                        "the chat template of {path} writes the date of the day (strftime_now), and tokens may not "
                        'change from day to day; say a date, such as data.today = "2026-07-26"',
                        path=self._path,
                    )
                ) from None
            raise TemplateError(
                say(
                    "{where}: the chat template refuses it: {reason}; mend that chat, drop it, or name another "
                    "template in data.chat_template",
                    where=chat.where,
                    reason=_reason(error),
                )
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
                    say(
                        "{where}: the chat template has a generation mark within another; mend it, or name another "
                        "in data.chat_template",
                        where=chat.where,
                    )
                )
        return "".join([*parts, raw[position:]]), answers


class _Prefixes:
    """Renderings of the first messages of a chat, beside the full text, and the cost of making them (`work`)."""

    def __init__(self, render: Callable[[int, bool], str], full_text: str, num_messages: int) -> None:
        self.full_text, self.work = full_text, 0
        self._render, self._num_messages = render, num_messages
        self._last = 0, ""  # the number of messages and the text of the last rendering without a prompt

    def text(self, number: int, adds_prompt: bool = False) -> str:
        """The text of the first `number` messages, followed by the prompt for an answer if `adds_prompt`. Raises
        TemplateError."""
        if number == self._num_messages:
            return self.full_text
        if number and number == self._last[0] and not adds_prompt:
            return self._last[1]
        self.work += _MESSAGE_WORK * number
        text = self._render(number, adds_prompt)
        self.work += len(text)
        if not adds_prompt:  # if answers follow each other, the end of one is the beginning of the next
            self._last = number, text
        return text

    def answer_range(self, i: int) -> tuple[int, int] | None:
        """The range of characters of answer `i` in the full text; None if it can't be located."""
        full_text = self.full_text
        try:
            prefix = self.text(i)
            if not full_text.startswith(prefix):
                return None
            with_answer = self.text(i + 1)
            if not (len(prefix) < len(with_answer) and full_text.startswith(with_answer)):
                return None
            with_prompt = self.text(i, adds_prompt=True)
        except (LateError, NoDateError):
            raise
        except TemplateError:  # the template refuses a chat that ends there
            return None
        # The prompt for an answer may contain more than precedes a given answer.
        begin = _num_common(with_prompt, full_text)
        return (begin, len(with_answer)) if len(prefix) <= begin < len(with_answer) else None


def _answer_ranges(prefixes: _Prefixes, learned: list[int]) -> Iterator[tuple[int, int]]:
    """The ranges of characters of the messages `learned` that can be located, until MOST_WORK is spent."""
    for i in learned:
        if prefixes.work > MOST_WORK:
            return
        if answer := prefixes.answer_range(i):
            yield answer


def work_of(chat: Chat) -> int:
    """About how many characters are rendered to locate the answers of a chat."""
    num_answers = sum(message["role"] == ASSISTANT for message in chat.messages)
    return min(MOST_WORK, 3 * num_answers * (chat.num_characters + _MESSAGE_WORK * len(chat.messages)) // 2)


def _num_common(first: str, second: str) -> int:
    """The length of the common prefix of two texts. Blocks are compared, whose size is halved again and again."""
    low, size = 0, 1 << 16
    shorter = min(len(first), len(second))
    while size:
        while low + size <= shorter and second.startswith(first[low : low + size], low):
            low += size
        size //= 2
    return low


def _generation_tag() -> type:
    """The Jinja extension for {% generation %}, the tag around an answer."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Puts marks around the text within the tag."""

        tags = {"generation"}  # noqa: RUF012 (a plain set, as in the library)

        def parse(self, parser: Any) -> Any:
            """A call that puts marks around the tag's body."""
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
        return say("it takes more memory than there is for a chat")
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def _marked(begin: str, end: str, caller: Any) -> str:
    return f"{begin}{caller()}{end}"


def _refuse(message: object) -> None:
    """The function that templates call to refuse a chat."""
    raise ValueError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without escapes for HTML, as templates expect it (Jinja's own `tojson` has them)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
