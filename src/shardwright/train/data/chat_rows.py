"""Chats in rows: messages of roles, in one of the ways in which people keep them.

- `messages`: a list of {"role": ..., "content": ...};
- `conversations`: such a list, or one of {"from": ..., "value": ...} (ShareGPT), whose human is the user and gpt the
  assistant;
- `prompt` and `completion`: two texts, or two lists of messages.

Other fields of a message, such as tool calls, go to the template as they are; those of a row, such as `tools`, do too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.train.data.row_files import FaultError, refuse_halves

# Columns of a file that are looked at; what is beside the messages is for the template.
CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "system", "documents")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "function": "tool", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Chat:
    """Messages, of which those from number `first_learned` on can be learned, with what else the template is told; or
    two texts, of which the second is learned. One that `asks` ends with what an answer begins with."""

    where: str
    messages: tuple[dict[str, Any], ...] = ()
    first_learned: int = 0
    told: Mapping[str, Any] | None = None
    prompt: str = ""
    completion: str = ""
    asks: bool = False

    @property
    def beginning(self) -> str:
        """The beginning that tells the chat from others: the first message."""
        return self.prompt or str(self.messages[0].get("content") if self.messages else self.completion)

    @property
    def num_characters(self) -> int:
        """About how long it is."""
        return len(self.prompt) + len(self.completion) + sum(len(str(one.get("content"))) for one in self.messages)


def chat_of(record: object, where: str) -> Chat:
    """The chat of one row. Raises FaultError."""
    if not isinstance(record, dict):
        kind = f"of type {type(record).__name__}"
        raise FaultError(f'{where} is {kind}; each line must be an object such as {{"messages": [...]}}')
    found = {name: value for name, value in record.items() if value is not None}
    told = {name: found[name] for name in ("tools", "documents") if name in found}
    if name := next((name for name in ("messages", "conversations") if name in found), ""):
        messages = _messages(found[name], f"{where}: field {name!r}")
        if isinstance(system := found.get("system"), str) and system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return Chat(where, _answered(messages, 0, where), told=told)
    if "prompt" in found and "completion" in found:
        prompt, completion = found["prompt"], found["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            for field, text in (("prompt", prompt), ("completion", completion)):
                refuse_halves(text, f"{where}: field {field!r}")
            if not completion:
                raise FaultError(f"{where}: field 'completion' is empty, so nothing is to be learned; drop that record")
            return Chat(where, prompt=prompt, completion=completion)
        before = _messages(prompt, f"{where}: field 'prompt'")
        messages = before + _messages(completion, f"{where}: field 'completion'")
        return Chat(where, _answered(messages, len(before), where), len(before), told=told)
    present = ", ".join(map(repr, list(found)[:12])) or "nothing"
    raise FaultError(
        f"{where} has neither 'messages' nor 'conversations' nor 'prompt' and 'completion', but {present}; name files "
        "of chats, or set data.chats to false"
    )


def question(text: str, where: str) -> Chat:
    """A chat that asks for an answer to what a user says."""
    return Chat(where, ({"role": "user", "content": text},), asks=True)


def _messages(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        what = "is an empty list" if value == [] else "is no list"
        raise FaultError(f'{where} {what} of messages such as {{"role": "user", "content": "..."}}; mend that record')
    return [_message(one, f"{where}, message {number}") for number, one in enumerate(value, 1)]


def _message(value: object, where: str) -> dict[str, Any]:
    example = 'a message is such as {"role": "user", "content": "..."}, or {"from": "human", "value": "..."}'
    if not isinstance(value, dict):
        raise FaultError(f"{where} is of type {type(value).__name__}; {example}")
    # A column of structs has every field in every row, those that are not there as null.
    fields = {name: one for name, one in value.items() if one is not None}
    if "role" not in fields and "from" in fields:
        role = fields.pop("from")
        fields["content"] = fields.pop("value", "")
        if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
            raise FaultError(
                f"{where} is from {str(role)[:40]!r}, and known are {', '.join(_SHAREGPT_ROLES)}; {example}"
            )
        fields["role"] = _SHAREGPT_ROLES[role]
    if not isinstance(fields.get("role"), str):
        raise FaultError(f"{where} has no role; {example}")
    _check_texts(fields, where)
    return fields


def _check_texts(value: object, where: str) -> None:
    """Raises FaultError for half a character, however deep it is."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            refuse_halves(one, where)
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


def _answered(messages: list[dict[str, Any]], first: int, where: str) -> tuple[dict[str, Any], ...]:
    if not any(message["role"] == ASSISTANT for message in messages[first:]):
        roles = ", ".join(dict.fromkeys(message["role"][:20] for message in messages))
        raise FaultError(f'{where} has no message of the role "{ASSISTANT}" to learn, but of {roles}; drop that record')
    return tuple(messages)
