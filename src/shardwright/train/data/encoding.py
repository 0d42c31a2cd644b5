"""Encodes a batch of texts and chats as token ids, in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import error_text
from shardwright.config.phrase import say
from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, LateError
from shardwright.train.data.tokenizer import Tokenizer, missing_begin

Item = str | Chat


class EncodingError(ValueError):
    """A batch can't be encoded; the message is one sentence that tells why."""


@dataclass(frozen=True)
class Encoded:
    """An encoded batch: the ids of all items, one after the other; the number of ids of each item; and for chats the
    begin and end of each learned range. `num_dropped` characters, such as `example`, have no token, and `num_lost`
    answers have no loss."""

    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    answers: NDArray[np.int64]
    num_characters: int
    num_dropped: int
    example: str
    num_answers: int
    num_lost: int


# The fields of Encoded that are arrays, which are sent between processes as raw bytes.
ARRAYS = ("ids", "lengths", "answers")


class Encoder(Protocol):
    """Encodes batches of texts or chats."""

    def encode(self, items: Sequence[Item]) -> Encoded:
        """Encode a batch. Raises EncodingError."""


class HereEncoder:
    """Encodes batches in this process."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, begins_chats: bool = False) -> None:
        """A template usually writes the begin of a chat itself. With `begins_chats`, a chat that does not begin with
        the tokenizer's begin token gets it, too."""
        self._tokenizer, self._template, self._begins_chats = tokenizer, template, begins_chats
        self._dtype = id_dtype(tokenizer)

    def ids_of(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The ids of each text. Raises ValueError."""
        return self._tokenizer.encode_batch(texts)

    def places_of(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of a text, and the range of characters that each stands for. Raises ValueError."""
        return self._tokenizer.encode_with_places(text)

    def encode(self, items: Sequence[Item]) -> Encoded:
        """Encode a batch. Raises EncodingError."""
        dropped = self._tokenizer.dropped
        previous_characters, previous_dropped = dropped.num_characters, dropped.num_dropped
        dropped.example = ""
        answers: list[NDArray[np.int64]] = []
        num_answers = num_lost = 0
        try:
            if all(isinstance(item, str) for item in items):
                ids = self.ids_of([item for item in items if isinstance(item, str)])
            else:
                ids, begin = [], 0
                for item in items:
                    assert isinstance(item, Chat)
                    chat_ids, learned, (num_in_chat, num_lost_in_chat) = self._chat(item)
                    ids.append(chat_ids)
                    answers.append(begin + learned)
                    begin += len(chat_ids)
                    num_answers, num_lost = num_answers + num_in_chat, num_lost + num_lost_in_chat
        except (EncodingError, LateError):
            raise
        except ValueError as error:
            raise EncodingError(
                say(
                    'the tokenizer of data.tokenizer can\'t encode the text: {reason}; use one with an "unknown" '
                    'token, or data.tokenizer = "bytes"',
                    reason=error_text(error),
                )
            ) from None
        return Encoded(
            np.concatenate(ids).astype(self._dtype) if ids else np.empty(0, self._dtype),
            np.array([len(item_ids) for item_ids in ids], np.int64),
            np.concatenate(answers) if answers else np.empty(0, np.int64),
            num_characters=dropped.num_characters - previous_characters,
            num_dropped=dropped.num_dropped - previous_dropped,
            example=dropped.example,
            num_answers=num_answers,
            num_lost=num_lost,
        )

    def _chat(self, chat: Chat) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, int]]:
        """The ids of a chat; the begin and end of each learned range; and the numbers of answers, and of answers
        without a loss."""
        if chat.messages:
            if self._template is None:
                raise EncodingError(
                    say(
                        "{where} has messages, and there is no chat template beside the tokenizer to write them "
                        'with; set data.chat_template = "chatml", which Shardwright has, or to a template of yours, '
                        "or data.tokenizer to the folder of a tokenizer that has one",
                        where=chat.where,
                    )
                )
            try:
                rendered = self._template.write(chat)
            except ValueError as error:
                raise EncodingError(error_text(error)) from None
            text, ranges, counted = rendered.text, rendered.answers, (rendered.num_answers, rendered.num_lost)
            end: tuple[int, ...] = ()
        else:
            text, end = chat.prompt + chat.completion, self._tokenizer.end_of_text
            ranges, counted = ((len(chat.prompt), len(text)),), (1, 0)
        ids, offsets = self.places_of(text)
        learned = np.zeros(len(ids), np.bool_)
        for start, stop in ranges:
            learned |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        begin = np.array(self._tokenizer.begin_of_text, np.int64)
        prefix = missing_begin(ids, begin) if self._begins_chats or not chat.messages else begin[:0]
        # The end of text after a completion is learned, too.
        learned = np.concatenate((np.zeros(len(prefix), np.bool_), learned, np.ones(len(end), np.bool_)))
        bounds = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0, append=0))
        return np.concatenate((prefix, ids, end)).astype(np.int64), bounds.astype(np.int64), counted


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest unsigned type that holds a tokenizer's ids, little-endian."""
    return np.min_scalar_type(max(tokenizer.num_ids - 1, 0)).newbyteorder("<")
