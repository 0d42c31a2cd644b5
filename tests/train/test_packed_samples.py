"""Chats that are packed: each whole and once, no sample too full, and what is cut is counted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.data.packed_samples import PackedSamples, pack
from shardwright.train.data.token_stream import TokenSpan, TokenStream


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(2, 25))
def test_every_document_is_in_one_sample(lengths: list[int], room: int) -> None:
    sizes = np.array(lengths, np.int64)
    packing = pack(sizes, room)
    assert sorted(packing.order.tolist()) == list(range(len(lengths)))
    held = np.minimum(sizes, room)
    filled = [held[part].sum() for part in np.split(packing.order, packing.ends[:-1])]
    assert max(filled) <= room
    assert min(map(int, filled)) > 0
    assert packing.num_cut == sum(length > room for length in lengths)
    assert packing.cut_tokens == sum(max(0, length - room) for length in lengths)
    # Two samples that would fit into one are never both there.
    assert len(filled) < 2 or sum(sorted(filled)[:2]) > room


def write(folder: Path, documents: list[list[int]], answers: list[tuple[int, int]]) -> TokenSpan:
    ids = np.concatenate(documents).astype("<u2")
    ids.tofile(folder / "ids")
    starts = np.cumsum([0] + [len(document) for document in documents[:-1]])
    starts.astype("<i8").tofile(folder / "starts")
    np.array(answers, "<i8").tofile(folder / "answers")
    return TokenSpan(folder / "ids", "<u2", 0, len(ids), starts=folder / "starts", answers=folder / "answers")


def plain(row: np.ndarray) -> list[int]:
    return (np.where(row < 0, -1 - row, row) % UNCOUNTED).tolist()


def test_samples_hold_chats_side_by_side(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
    span = write(tmp_path, documents, [(1, 3), (6, 8), (9, 10), (12, 19)])
    samples = PackedSamples([span], 7, seed=1, shuffle=False)
    rows = samples.batch(0, 2)
    assert [plain(row) for row in rows] == [[11, 12, 13, 14, 15, 16, 17, 18], [4, 5, 6, 7, 8, 1, 2, 3]]
    assert len(samples) == 3
    last = samples.batch(2, 1)[0]
    assert plain(last) == [9, 10, 0, 0, 0, 0, 0, 0]
    assert np.flatnonzero(rows[1] < 0).tolist() == [0, 5]
    counted = [(row >= 0) & (row < UNCOUNTED) for row in (*rows, last)]
    assert [np.flatnonzero(one).tolist() for one in counted] == [[2, 3, 4, 5, 6, 7], [3, 4, 6, 7], [1]]
    assert np.flatnonzero(last < 0).tolist() == [0, 2]  # what fills it up is a document of its own
    assert samples.packing.num_cut == 1
    assert samples.packing.cut_tokens == 1


def test_epochs_are_shuffled_and_any_place_is_the_same(tmp_path: Path) -> None:
    span = write(tmp_path, [[n] * 5 for n in range(1, 40)], [])
    samples = PackedSamples([span], 9, seed=5)
    rows = samples.batch(0, 3 * len(samples))
    assert np.array_equal(np.concatenate([samples.batch(n, 1) for n in range(len(rows))]), rows)
    epochs = np.split(rows, 3)
    assert len({epoch.tobytes() for epoch in epochs}) == 3
    assert len({np.sort(epoch, axis=0).tobytes() for epoch in epochs}) == 1


def test_spans_that_were_cut_pack_their_own(tmp_path: Path) -> None:
    span = write(tmp_path, [[1, 2, 3], [4, 5, 6], [7, 8]], [(1, 2), (4, 6), (7, 8)])
    samples = PackedSamples([span.cut(3, 8)], 4, seed=1, shuffle=False)
    assert [plain(row) for row in samples.batch(0, 1)] == [[4, 5, 6, 7, 8]]
    row = samples.batch(0, 1)[0]
    assert np.flatnonzero((row >= 0) & (row < UNCOUNTED)).tolist() == [1, 2, 4]


def test_documents_that_keep_nothing_to_learn_are_counted(tmp_path: Path) -> None:
    documents = [list(range(10)), list(range(4)), list(range(8))]
    span = write(tmp_path, documents, [(5, 9), (11, 13), (20, 22)])  # from the 6th, the 2nd and the 7th token on
    samples = {room: PackedSamples([span], room - 1, seed=0) for room in (2, 6, 7, 20)}
    assert TokenStream([span], marks=True).first_learned().tolist() == [5, 1, 6]
    assert {room: one.num_unlearned for room, one in samples.items()} == {2: 2, 6: 1, 7: 0, 20: 0}
    assert TokenStream([span.cut(10, 22)], marks=True).first_learned().tolist() == [1, 6]
    both = TokenStream([span.cut(10, 14), span.cut(0, 10)], marks=True)  # each file has answers of the other, too
    assert both.first_learned().tolist() == [1, 5]
    assert PackedSamples([replace(span, answers=None)], 5, seed=0).num_unlearned == 0  # all of it is learned
