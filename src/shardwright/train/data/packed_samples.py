"""Samples from chats: several complete chats are packed into each sample, and the remaining room is filled up.

Windows of the stream would cut chats in two, and an answer without its question teaches little. So chats are packed:
the longest first, each into the sample with the least room that still holds it (best fit decreasing; Johnson 1973 shows
that it uses at most 11/9 of the fewest samples, and 4 more). A chat that is longer than a sample is cut at its end.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.config.phrase import say
from shardwright.sharding.token_marks import FILLING, UNCOUNTED
from shardwright.train.data.samples import in_order, refuse_negative
from shardwright.train.data.token_stream import TokenSpan, TokenStream


@dataclass(frozen=True)
class Packing:
    """The documents of each sample: sample n has order[ends[n - 1] : ends[n]]. `num_cut` documents were cut, by
    `cut_tokens` tokens together."""

    order: NDArray[np.int64]
    ends: NDArray[np.int64]
    num_cut: int
    cut_tokens: int

    def __len__(self) -> int:
        return len(self.ends)


def pack(lengths: NDArray[np.int64], room: int) -> Packing:
    """Pack documents of these lengths into samples of `room` tokens. The result depends on these numbers alone."""
    cut_lengths = np.minimum(lengths, room)
    by_length = np.argsort(-cut_lengths, kind="stable")
    members: list[list[int]] = []
    open_by_room: dict[int, list[int]] = {}  # samples by their free room, the newest last
    rooms: list[int] = []  # the keys of open_by_room, ascending
    for document, length in zip(by_length.tolist(), cut_lengths[by_length].tolist(), strict=True):
        index = bisect_left(rooms, length)
        if index == len(rooms):
            sample, free = len(members), room
            members.append([])
        else:
            free = rooms[index]
            sample = open_by_room[free].pop()
            if not open_by_room[free]:
                del open_by_room[free], rooms[index]
        members[sample].append(document)
        free -= length
        if free > 0:
            if free not in open_by_room:
                open_by_room[free] = []
                insort(rooms, free)
            open_by_room[free].append(sample)
    order = np.array([document for sample in members for document in sample], np.int64)
    ends = np.cumsum([len(sample) for sample in members], dtype=np.int64)
    excess = lengths[lengths > room] - room
    return Packing(order, ends, len(excess), int(excess.sum()))


def is_unlearned(stream: TokenStream, room: int) -> NDArray[np.bool_]:
    """A mask of the documents that have no learned token within their first `room` tokens: [documents]."""
    return stream.first_learned() >= np.minimum(np.diff(stream.documents()), room)


class PackedSamples:
    """The samples of one side of chats, as an endless sequence: each epoch has every sample once, in its own order, or
    in the order of the packing if `shuffle` is false.

    The free room of a sample is filled with a document of zeros that have the mark of filling; other marks are
    explained in token_stream.py. `num_unlearned` documents have no learned token after they are cut.
    """

    def __init__(self, tokens: Sequence[TokenSpan], sequence: int, seed: int, shuffle: bool = True) -> None:
        """Map the files. Raises ValueError if there are no chats, OSError if a file is gone."""
        self.sequence = sequence
        self._seed = seed if shuffle else None
        self._stream = TokenStream(tokens, marks=True)
        self._bounds = self._stream.documents()
        self.packing = pack(np.diff(self._bounds), sequence + 1)
        self.num_unlearned = int(is_unlearned(self._stream, sequence + 1).sum())
        if not len(self.packing):
            raise ValueError(say("there are no chats to pack"))

    def __len__(self) -> int:
        """The number of samples in an epoch."""
        return len(self.packing)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples first, first + 1, ..., first + count - 1: [count, sequence + 1]. May cross epochs. Raises ValueError
        if `first` or `count` is negative."""
        refuse_negative(first, count)
        rows = np.full((count, self.sequence + 1), FILLING | UNCOUNTED, np.int64)
        for row, sample in zip(rows, in_order(first, count, len(self), self._seed).tolist(), strict=True):
            begin = self.packing.ends[sample - 1] if sample else 0
            filled = 0
            for document in self.packing.order[begin : self.packing.ends[sample]].tolist():
                start, stop = self._bounds[document : document + 2].tolist()
                piece = row[filled : filled + stop - start]
                self._stream.read(start, piece)
                filled += len(piece)
            row[filled : filled + 1] = -1 - FILLING
        return rows
