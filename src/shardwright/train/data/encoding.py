"""Texts and chats to token ids: what one process does with a batch of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, LateError
from shardwright.train.data.tokenizer import Tokenizer, missing_begin

Item = str | Chat


class EncodingError(ValueError):
    """Why a batch could not be encoded, in one sentence."""


@dataclass(frozen=True)
class Encoded:
    """The ids of a batch's items one after the other, how many each has, and pairs of where what is learned begins and
    ends, of chats; so many characters have no token, such as `example`, and so many answers no loss."""

    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    answers: NDArray[np.int64]
    num_characters: int
    num_dropped: int
    example: str
    num_answers: int
    num_lost: int


# The fields of Encoded that are arrays: they travel between processes as they lie in memory.
ARRAYS = ("ids", "lengths", "answers")


class Encoder(Protocol):
    """Encodes batches."""

    def encode(self, items: Sequence[Item]) -> Encoded:
        """Raises EncodingError."""


class HereEncoder:
    """Encodes in this process."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, begins_chats: bool = False) -> None:
        """A template says by itself what a chat begins with; where this `begins_chats`, those that do not begin with
        the tokenizer's token get it, too."""
        self._tokenizer, self._template, self._begins_chats = tokenizer, template, begins_chats
        self._dtype = id_dtype(tokenizer)

    def ids_of(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The ids of each text. Raises ValueError."""
        return self._tokenizer.encode_batch(texts)

    def places_of(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of a text, and which characters each stands for. Raises ValueError."""
        return self._tokenizer.encode_with_places(text)

    def encode(self, items: Sequence[Item]) -> Encoded:
        """Raises EncodingError."""
        dropped = self._tokenizer.dropped
        before, dropped.example = (dropped.num_characters, dropped.num_dropped), ""
        answers: list[NDArray[np.int64]] = []
        num_answers = num_lost = 0
        try:
            if all(isinstance(item, str) for item in items):
                ids = self.ids_of([item for item in items if isinstance(item, str)])
            else:
                ids, begin = [], 0
                for item in items:
                    assert isinstance(item, Chat)
                    of_chat, learned, counted = self._chat(item)
                    ids.append(of_chat)
                    answers.append(begin + learned)
                    begin += len(of_chat)
                    num_answers, num_lost = num_answers + counted[0], num_lost + counted[1]
        except (EncodingError, LateError):
            raise
        except ValueError as error:
            raise EncodingError(
                f'the tokenizer of data.tokenizer can\'t encode the text: {error}; use one with an "unknown" token, '
                'or data.tokenizer = "bytes"'
            ) from None
        return Encoded(
            np.concatenate(ids).astype(self._dtype) if ids else np.empty(0, self._dtype),
            np.array([len(one) for one in ids], np.int64),
            np.concatenate(answers) if answers else np.empty(0, np.int64),
            num_characters=dropped.num_characters - before[0],
            num_dropped=dropped.num_dropped - before[1],
            example=dropped.example,
            num_answers=num_answers,
            num_lost=num_lost,
        )

    def _chat(self, chat: Chat) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, int]]:
        """The ids of a chat, pairs of where what is learned begins and ends, and how many answers there are and are
        lost."""
        if chat.messages:
            if self._template is None:
                raise EncodingError(
                    f"{chat.where} has messages, and there is no chat template beside the tokenizer to write them "
                    "with; name one in data.chat_template, or in data.tokenizer the folder of a tokenizer that has one"
                )
            try:
                written = self._template.write(chat)
            except ValueError as error:
                raise EncodingError(str(error)) from None
            text, ranges, counted = written.text, written.answers, (written.num_answers, written.num_lost)
            end: tuple[int, ...] = ()
        else:
            text, end = chat.prompt + chat.completion, self._tokenizer.end_of_text
            ranges, counted = ((len(chat.prompt), len(text)),), (1, 0)
        ids, offsets = self.places_of(text)
        learned = np.zeros(len(ids), np.bool_)
        for first, last in ranges:
            learned |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
        begin = np.array(self._tokenizer.begin_of_text, np.int64)
        put_before = missing_begin(ids, begin) if self._begins_chats or not chat.messages else begin[:0]
        # What ends a completion is learned, too.
        learned = np.concatenate((np.zeros(len(put_before), np.bool_), learned, np.ones(len(end), np.bool_)))
        turns = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0, append=0))
        return np.concatenate((put_before, ids, end)).astype(np.int64), turns.astype(np.int64), counted


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds a tokenizer's ids, little-endian."""
    return np.min_scalar_type(max(tokenizer.num_ids - 1, 0)).newbyteorder("<")
