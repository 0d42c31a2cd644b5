"""Writes documents to token files: text is collected, encoded in batches, and written in its original order."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.dropped_text import Dropped
from shardwright.train.data.encoding import Encoded, Item, id_dtype
from shardwright.train.data.encoding_pool import EncodingPool, HereAndNow
from shardwright.train.data.progress import Progress
from shardwright.train.data.tokenizer import Tokenizer, missing_begin

_TEXT, _CHAT, _END, _END_OF_CHAT = range(4)


@dataclass
class _Batch:
    """Items that are encoded together, and the order of output: the side and the kind of each item and of each end of a
    document."""

    items: list[Item] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    num_characters: int = 0


class TokenWriter:
    """Appends the ids of documents to the `outputs` file of their side (0 or 1), the positions of document starts to
    its `starts` file, and the ranges of learned tokens of chats to its `answers` file."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoding: EncodingPool | HereAndNow,
        outputs: Sequence[BinaryIO],
        starts: Sequence[BinaryIO],
        answers: Sequence[BinaryIO],
        progress: Progress,
    ) -> None:
        self.num_documents = self.num_answers = self.num_lost = 0
        self.num_tokens = [0, 0]
        self.counts = np.zeros(tokenizer.num_ids, np.int64)
        self.dropped = Dropped()
        # The ids around a text. Chats get theirs from the encoder.
        self._begin, self._end = (
            np.array(ids, id_dtype(tokenizer)) for ids in (tokenizer.begin_of_text, tokenizer.end_of_text)
        )
        self._encoding, self._progress = encoding, progress
        self._outputs, self._starts, self._answers = outputs, starts, answers
        self._begins = [True, True]  # for each side: is its next token the first of a document?
        self._waiting: deque[tuple[_Batch, Future[Encoded]]] = deque()
        self._batch = _Batch()

    def drop(self) -> None:
        """Forget the text that is not written yet."""
        self._batch = _Batch()
        self._waiting.clear()

    def add(self, side: int, text: str) -> None:
        """Add a piece of a document's text."""
        self._add(side, text, len(text))

    def add_chat(self, side: int, chat: Chat) -> None:
        """Add a chat, which is a document of its own."""
        self._end_document(side, _END_OF_CHAT, chat)

    def end_document(self, side: int) -> None:
        """End a document whose text is complete."""
        self._end_document(side, _END)

    def flush(self) -> None:
        """Write all collected text. Raises OSError, or PlanError if it can't be encoded."""
        self._submit()
        while self._waiting:
            self._write(*self._waiting.popleft())

    def _end_document(self, side: int, kind: int, chat: Chat | None = None) -> None:
        if chat is not None:
            self._batch.items.append(chat)
            self._batch.sides.append(side)
            self._batch.kinds.append(_CHAT)
            self._batch.num_characters += chat.num_characters
        self._batch.sides.append(side)
        self._batch.kinds.append(kind)
        self.num_documents += 1
        self._submit_full()

    def _add(self, side: int, text: str, num_characters: int) -> None:
        self._batch.items.append(text)
        self._batch.sides.append(side)
        self._batch.kinds.append(_TEXT)
        self._batch.num_characters += num_characters
        self._submit_full()

    def _submit_full(self) -> None:
        if self._batch.num_characters >= self._encoding.batch_characters:
            self._submit()
            while len(self._waiting) > self._encoding.num_ahead:
                self._write(*self._waiting.popleft())

    def _submit(self) -> None:
        if self._batch.sides:
            self._waiting.append((self._batch, self._encoding.submit(self._batch.items)))
            self._batch = _Batch()

    def _write(self, batch: _Batch, future: "Future[Encoded]") -> None:
        encoded = future.result()
        self.dropped.count(encoded.num_characters, encoded.num_dropped, encoded.example)
        self.num_answers += encoded.num_answers
        self.num_lost += encoded.num_lost
        ids_of: tuple[list[NDArray[np.integer]], ...] = ([], [])
        starts_of: tuple[list[int], ...] = ([], [])
        answers_of: tuple[list[NDArray[np.int64]], ...] = ([], [])
        ends, lengths, begin = list(self.num_tokens), iter(encoded.lengths.tolist()), 0
        for side, kind in zip(batch.sides, batch.kinds, strict=True):
            length = next(lengths) if kind in (_TEXT, _CHAT) else 0
            ids = self._end if kind == _END else encoded.ids[begin : begin + length]
            if self._begins[side] and len(ids):
                starts_of[side].append(ends[side])
                self._begins[side] = False
                if kind == _TEXT:
                    ids = np.concatenate((missing_begin(ids, self._begin), ids))
            if kind in (_TEXT, _CHAT):
                if self._answers:
                    first_turn, last_turn = np.searchsorted(encoded.answers[::2], [begin, begin + length])
                    answers_of[side].append(encoded.answers[2 * first_turn : 2 * last_turn] + (ends[side] - begin))
                begin += length
            else:
                self._begins[side] = True
            ids_of[side].append(ids)
            ends[side] += len(ids)
        for side, parts in enumerate(ids_of):
            ids = np.concatenate(parts) if parts else np.empty(0, self._end.dtype)
            self._outputs[side].write(ids.tobytes())
            self._starts[side].write(np.array(starts_of[side], "<i8").tobytes())
            self.num_tokens[side] += len(ids)
            self.counts += np.bincount(ids, minlength=len(self.counts))
        for file, pairs in zip(self._answers, answers_of, strict=False):
            file.write(np.concatenate([np.empty(0, "<i8"), *pairs]).astype("<i8").tobytes())
        self._progress.step(sum(self.num_tokens))
