"""Chats in rows, in one of the usual formats:

- `messages`: a list of {"role": ..., "content": ...};
- `conversations`: such a list, or a list of {"from": ..., "value": ...} (ShareGPT), with the roles human and gpt for
  user and assistant;
- `prompt` and `completion`: two texts, or two lists of messages.

Other fields of a message, such as tool calls, and of a row, such as `tools`, go to the template unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.phrase import say
from shardwright.train.data.row_faults import FaultError, refuse_halves

# The columns of a file that are read. Columns without messages are for the template.
CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "system", "documents")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "function": "tool", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
ASSISTANT = "assistant"
_EXAMPLE = say('a message is such as {{"role": "user", "content": "..."}}, or {{"from": "human", "value": "..."}}')


@dataclass(frozen=True)
class Chat:
    """Either messages, of which those from index `first_learned` on are learned, with more fields for the template; or
    a prompt and a completion, which is learned. `where` names the chat's place in error messages. If `adds_prompt`, the
    template writes the prompt for an answer after the messages."""

    where: str
    messages: tuple[dict[str, Any], ...] = ()
    first_learned: int = 0
    template_fields: Mapping[str, Any] | None = None
    prompt: str = ""
    completion: str = ""
    adds_prompt: bool = False

    @property
    def beginning(self) -> str:
        """The text that identifies the chat: its first message, or its prompt."""
        return self.prompt or str(self.messages[0].get("content") if self.messages else self.completion)

    @property
    def num_characters(self) -> int:
        """About the length of the chat."""
        num_in_messages = sum(len(str(message.get("content"))) for message in self.messages)
        return len(self.prompt) + len(self.completion) + num_in_messages


def chat_of(record: object, where: str) -> Chat:
    """The chat of one row. Raises FaultError."""
    if not isinstance(record, dict):
        raise FaultError(
            say(
                '{where} is of type {kind}; each line must be an object such as {{"messages": [...]}}',
                where=where,
                kind=type(record).__name__,
            )
        )
    fields = {name: value for name, value in record.items() if value is not None}
    template_fields = {name: fields[name] for name in ("tools", "documents") if name in fields}
    if name := next((name for name in ("messages", "conversations") if name in fields), ""):
        messages = _messages(fields[name], f"{where}: field {name!r}")
        if isinstance(system := fields.get("system"), str) and system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return Chat(where, _with_answer(messages, 0, where), template_fields=template_fields)
    if "prompt" in fields and "completion" in fields:
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            for field, text in (("prompt", prompt), ("completion", completion)):
                refuse_halves(text, f"{where}: field {field!r}")
            if not completion:
                raise FaultError(
                    say(
                        "{where}: field 'completion' is empty, so nothing is to be learned; drop that record",
                        where=where,
                    )
                )
            return Chat(where, prompt=prompt, completion=completion)
        prompt_messages = _messages(prompt, f"{where}: field 'prompt'")
        messages = prompt_messages + _messages(completion, f"{where}: field 'completion'")
        num_prompt = len(prompt_messages)
        return Chat(where, _with_answer(messages, num_prompt, where), num_prompt, template_fields=template_fields)
    if not fields:
        raise FaultError(
            say(
                "{where} has neither 'messages' nor 'conversations' nor 'prompt' and 'completion', but nothing; name "
                "files of chats, or set data.chats to false",
                where=where,
            )
        )
    raise FaultError(
        say(
            "{where} has neither 'messages' nor 'conversations' nor 'prompt' and 'completion', but {present}; name "
            "files of chats, or set data.chats to false",
            where=where,
            present=tuple(map(repr, list(fields)[:12])),
        )
    )


def question(text: str, where: str) -> Chat:
    """A chat of one message of a user, rendered with the prompt for an answer."""
    return Chat(where, ({"role": "user", "content": text},), adds_prompt=True)


def _messages(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        fault = say(
            '{where} is no list of messages such as {{"role": "user", "content": "..."}}; mend that record', where=where
        )
        if value == []:
            fault = say(
                '{where} is an empty list of messages such as {{"role": "user", "content": "..."}}; mend that record',
                where=where,
            )
        raise FaultError(fault)
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FaultError(
            say("{where} is of type {kind}; {example}", where=where, kind=type(value).__name__, example=_EXAMPLE)
        )
    # A column of structs has every field in every row; missing ones are null.
    fields = {name: content for name, content in value.items() if content is not None}
    if "role" not in fields and "from" in fields:
        role = fields.pop("from")
        fields["content"] = fields.pop("value", "")
        if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
            raise FaultError(
                say(
                    "{where} is from {role}, and known are {roles}; {example}",
                    where=where,
                    role=repr(str(role)[:40]),
                    roles=tuple(_SHAREGPT_ROLES),
                    example=_EXAMPLE,
                )
            )
        fields["role"] = _SHAREGPT_ROLES[role]
    if not isinstance(fields.get("role"), str):
        raise FaultError(say("{where} has no role; {example}", where=where, example=_EXAMPLE))
    _check_texts(fields, where)
    return fields


def _check_texts(value: object, where: str) -> None:
    """Raises FaultError for a lone surrogate in any text of a nested value."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            refuse_halves(item, where)
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item


def _with_answer(messages: list[dict[str, Any]], first: int, where: str) -> tuple[dict[str, Any], ...]:
    """The messages as a tuple. Raises FaultError if none from number `first` on is the assistant's."""
    if not any(message["role"] == ASSISTANT for message in messages[first:]):
        roles = tuple(dict.fromkeys(message["role"][:20] for message in messages))
        raise FaultError(
            say(
                '{where} has no message of the role "{role}" to learn, but of {roles}; drop that record',
                where=where,
                role=ASSISTANT,
                roles=roles,
            )
        )
    return tuple(messages)
