"""From files to samples: every format, every fault, the split, the cache and the order of samples."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError, RunError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.train.data import document_files as documents
from shardwright.train.data import encoding_pool, source_files, token_cache
from shardwright.train.data.once_each import unigram_loss
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.samples import Samples, shuffled, token_shares
from shardwright.train.data.token_stream import TokenSpan, cut
from shardwright.train.data.tokenizer import load_tokenizer

SEEDS = st.integers(0, 2**63 - 1)
MODEL = ModelSpec(sequence=4)
TEXTS = [f"document {number}: häßlich, 漢字 and 🙂\nsecond line {number * number}" for number in range(40)]


def prepare(path, folder, *, model=MODEL, seed=0, validation_share=0.0, **fields):
    data = DataSpec(path=str(path), validation_share=validation_share, **fields)
    return prepare_tokens(data, model, seed, Path(folder))


def faults_of(path, folder, **fields):
    with pytest.raises(PlanError) as caught:
        prepare(path, folder, **fields)
    assert caught.value.subject == "data"
    return caught.value.faults


def stream(spans):
    return np.concatenate([span.open() for span in spans]).astype(np.int64)


def text_of(spans):
    return bytes(stream(spans).tolist()).decode()


def joined(texts):
    return "".join(text + "\n" for text in texts)


def write_ids(path, ids, dtype="<u2"):
    path.write_bytes(np.array(ids, dtype).tobytes())
    return path


def span_of(path, ids, dtype="<u2"):
    write_ids(path, ids, dtype)
    return TokenSpan(path, dtype, 0, len(ids))


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def write_parquet(path, columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=7)
    return path


def write_tokenizer(path, end_of_text="<|endoftext|>"):
    """A small byte-level BPE, with the truncation, padding and template that such files often carry."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [end_of_text, "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{end_of_text} $A", special_tokens=[(end_of_text, 0)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>")
    tokenizer.save(str(path))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder


# --- the order of samples ---


@settings(max_examples=60)
@given(st.integers(1, 5000), SEEDS, st.integers(0, 10**9))
def test_an_epoch_is_a_permutation(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097])
def test_sizes_around_powers_of_two_are_permutations(size):
    for epoch in range(5):
        assert np.array_equal(np.sort(shuffled(np.arange(size), size, 7, epoch)), np.arange(size))


@given(st.integers(40, 2000), SEEDS, st.integers(0, 1000))
@settings(max_examples=30)
def test_epochs_and_seeds_differ(size, seed, epoch):
    here = np.arange(size)
    order = shuffled(here, size, seed, epoch)
    assert not np.array_equal(order, shuffled(here, size, seed, epoch + 1))
    assert not np.array_equal(order, shuffled(here, size, seed ^ 1, epoch))
    assert not np.array_equal(order, here)


def test_a_position_needs_no_other_position():
    size = 10**12  # would be 8 TB as a table
    positions = np.array([0, 1, 2, size // 2, size - 1])
    order = shuffled(positions, size, 3, 4)
    assert len(set(order.tolist())) == 5
    assert 0 <= order.min() <= order.max() < size
    for position, window in zip(positions, order, strict=True):
        assert shuffled(np.array([position]), size, 3, 4)[0] == window


def test_every_window_lands_everywhere_equally_often():
    size, epochs = 12, 3000
    landed = np.zeros((size, size), np.int64)
    for epoch in range(epochs):
        landed[np.arange(size), shuffled(np.arange(size), size, 0, epoch)] += 1
    expected = epochs / size
    chi_square = ((landed - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


def test_neighbours_are_separated():
    size = 4000
    steps = np.diff(shuffled(np.arange(size), size, 1, 0))
    assert (np.abs(steps) < size // 100).mean() < 0.04  # 2% if random


def test_the_order_never_changes_between_versions():
    # A run that is resumed under a later version must see the samples that it would have seen.
    assert shuffled(np.arange(10), 10, 1234, 0).tolist() == ORDER_OF_TEN
    assert shuffled(np.arange(3), 10**9, 1234, 5).tolist() == ORDER_OF_A_BILLION


ORDER_OF_TEN = [6, 5, 3, 4, 1, 0, 7, 2, 9, 8]
ORDER_OF_A_BILLION = [510957519, 206826990, 710232839]


# --- samples ---


def test_windows_overlap_by_the_target_of_the_last_input(tmp_path):
    samples = Samples([span_of(tmp_path / "a.bin", range(14))], 4, 0, shuffle=False)
    assert len(samples) == 3  # 0..12; token 13 is a rest
    assert samples.batch(0, 3).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert samples.batch(4, 1)[0].tolist() == [4, 5, 6, 7, 8]  # the second epoch is in file order, too
    assert samples.batch(0, 1)[0].dtype == np.int64
    assert samples.batch(5, 0).shape == (0, 5)


@pytest.mark.parametrize(("num_ids", "windows"), [(4, None), (5, 1), (8, 1), (9, 2)])
def test_the_last_target_counts(tmp_path, num_ids, windows):
    span = span_of(tmp_path / "a.bin", range(num_ids))
    if windows:
        assert len(Samples([span], 4, 0)) == windows
    else:
        with pytest.raises(ValueError, match="4 tokens hold no window of 4 \\+ 1"):
            Samples([span], 4, 0)


def test_samples_are_counted_from_zero(tmp_path):
    samples = Samples([span_of(tmp_path / "a.bin", range(14))], 4, 0)
    with pytest.raises(ValueError, match="counted from 0"):
        samples.batch(-1, 1)[0]


def test_every_window_once_an_epoch(tmp_path):
    samples = Samples([span_of(tmp_path / "a.bin", range(1001))], 10, 5)
    orders = [samples.batch(epoch * 100, 100)[:, 0].tolist() for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, 1000, 10))
    assert orders[0] != orders[1] != orders[2]


@settings(max_examples=40)
@given(st.data(), st.integers(1, 30), SEEDS)
def test_however_a_batch_is_split_the_rows_are_the_same(tmp_path_factory, data, sequence, seed):
    """So the order doesn't depend on ranks, microbatches or where a run was resumed."""
    num_ids = data.draw(st.integers(sequence + 1, 400))
    span = span_of(tmp_path_factory.mktemp("split") / "a.bin", range(num_ids))
    count = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(0, 500))
    whole = Samples([span], sequence, seed).batch(first, count)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    samples = Samples([span], sequence, seed)
    parts = [samples.batch(first + a, b - a) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(samples.batch(first + count - 1, 1)[0], whole[-1])


@settings(max_examples=40)
@given(st.lists(st.integers(0, 60), max_size=5), st.integers(1, 12))
def test_files_are_read_as_one_stream(tmp_path_factory, cuts, sequence):
    folder = tmp_path_factory.mktemp("stream")
    borders = [0, *sorted(cuts), 60]
    dtypes = ["|u1", "<u2", ">i4", "<u8"]
    spans = [span_of(folder / f"{i}.bin", range(a, b), dtypes[i % 4]) for i, (a, b) in enumerate(pairwise(borders))]
    samples = Samples(spans, sequence, 0, shuffle=False)
    assert np.array_equal(samples.batch(0, len(samples))[:, 0], np.arange(len(samples)) * sequence)
    assert np.array_equal(samples.batch(0, len(samples))[:, -1], np.arange(1, len(samples) + 1) * sequence)
    start, stop = sorted((borders[len(borders) // 2], 47))
    if start < stop:
        assert np.array_equal(stream(cut(spans, start, stop)), np.arange(start, stop))


def test_shares_of_tokens_are_smoothed_counts(tmp_path, monkeypatch):
    spans = [span_of(tmp_path / "t.bin", [0, 0, 0, 1, 2, 2])]
    expected = [4 / 10, 2 / 10, 3 / 10, 1 / 10]  # 6 tokens + 4 ids
    np.testing.assert_allclose(token_shares(spans, 4), expected, rtol=1e-12)
    monkeypatch.setattr("shardwright.train.data.token_stream._CHUNK_TOKENS", 2)
    np.testing.assert_allclose(token_shares(spans, 4), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="vocabulary 2"):
        token_shares(spans, 2)


# --- formats ---


def test_a_folder_of_text_is_read_in_sorted_order_without_hidden_files(tmp_path, cache):
    docs = tmp_path / "docs"
    (docs / "b" / "c").mkdir(parents=True)
    (docs / ".git").mkdir()
    names = {"z.md": "last of the top\r\n", "a": "first", "b/x.py": "x = 1\n", "b/c/y.unknown": "deep", "empty.txt": ""}
    for name, text in (names | {".hidden": "no", ".git/config": "no"}).items():
        (docs / name).write_bytes(text.encode())
    (docs / "b" / "up").symlink_to(docs)  # a loop
    files = prepare(docs, cache)
    assert text_of(files.train) == "first\nlast of the top\r\n\nx = 1\n\ndeep\n"
    assert (files.num_documents, files.split, files.validation) == (4, "none", None)
    assert files.num_train_tokens == len(stream(files.train)) == files.train_samples().num_tokens
    assert files.validation_samples() is None
    assert files.train[0].dtype == "|u1"


def test_a_glob_takes_files_alone(docs, cache):
    (docs / "sub.txt").mkdir()
    (docs / "sub.txt" / "inner.txt").write_text("inner")
    assert text_of(prepare(docs / "0[12].t?t", cache).train) == joined(TEXTS[1:3])
    assert text_of(prepare(docs / "*.txt", cache).train) == joined(TEXTS)
    assert text_of(prepare(docs / "**" / "inner*", cache).train) == "inner\n"
    (docs / "0[12].txt").write_text("a name that looks like a glob")
    assert text_of(prepare(docs / "0[12].txt", cache).train) == "a name that looks like a glob\n"


def test_home_and_relative_paths(docs, cache, monkeypatch):
    monkeypatch.chdir(docs.parent)
    monkeypatch.setenv("HOME", str(docs))
    assert text_of(prepare("docs/00.txt", "cache").train) == joined(TEXTS[:1])
    assert text_of(prepare("docs/*0.txt", "cache").train) == joined(TEXTS[::10])
    files = prepare("~/01.txt", "cache")
    assert text_of(files.train) == joined(TEXTS[1:2])
    assert files.train[0].path.is_absolute()


def test_a_byte_order_mark_is_not_text(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert text_of(prepare(tmp_path / "a.txt", cache).train) == "hello\n"
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert text_of(prepare(tmp_path / "a.jsonl", cache).train) == "hello\n"


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=8), st.integers(1, 9))
def test_text_comes_through_however_it_is_cut(tmp_path_factory, text, piece_bytes):
    text = "x" + text  # no byte order mark
    folder = tmp_path_factory.mktemp("cut")
    (folder / "a.txt").write_bytes(text.encode())
    write_jsonl(folder / "a.jsonl", [text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE_BYTES", piece_bytes)
        patch.setattr(encoding_pool.HereAndNow, "batch_characters", 11)
        assert text_of(prepare(folder / "a.txt", folder / "cache").train) == text + "\n"
        assert text_of(prepare(folder / "a.jsonl", folder / "cache").train) == text + "\n"


def test_a_document_larger_than_a_piece(tmp_path, cache):
    text = "漢" * 800_000 + "\n" + "é" * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert text_of(prepare(tmp_path / "a.txt", cache).train) == text + "\n"


def test_jsonl_is_a_document_a_line(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    path.write_text(path.read_text() + "\n  \n")
    files = prepare(path, cache)
    assert text_of(files.train) == joined(TEXTS)
    assert files.num_documents == len(TEXTS)
    other = write_jsonl(tmp_path / "b.txt", TEXTS, field="body")
    assert text_of(prepare(other, cache, format="jsonl", text_field="body").train) == joined(TEXTS)


def test_parquet_is_a_document_a_row(tmp_path, cache):
    path = write_parquet(tmp_path / "a.parquet", {"id": list(range(40)), "text": TEXTS})
    assert text_of(prepare(path, cache).train) == joined(TEXTS)
    other = write_parquet(tmp_path / "b.pq", {"a.b": TEXTS})
    assert text_of(prepare(other, cache, format="parquet", text_field="a.b").train) == joined(TEXTS)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_token_file_is_used_in_place(tmp_path, cache, dtype):
    ids = np.arange(100) % 97
    path = write_ids(tmp_path / "a.bin", ids, dtype)
    files = prepare(path, cache, model=ModelSpec(sequence=4, vocab=97), token_dtype=dtype)
    assert [span.path for span in files.train] == [path]
    assert np.array_equal(stream(files.train), ids)
    assert (files.largest_id, files.num_documents) == (96, 1)
    assert [entry.suffix for entry in cache.iterdir()] == [".json"]


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i8", "u8"])
def test_a_numpy_file_is_used_in_place(tmp_path, cache, dtype):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100).astype(dtype))
    files = prepare(path, cache, validation_share=0.25)
    assert {span.path for span in (*files.train, *files.validation)} == {path}
    assert stream(files.train).tolist() == list(range(75))
    assert stream(files.validation).tolist() == list(range(75, 100))


def test_token_files_are_joined_without_a_copy(tmp_path, cache):
    write_ids(tmp_path / "1.bin", range(50))
    write_ids(tmp_path / "2.bin", range(50, 120))
    files = prepare(tmp_path / "*.bin", cache, validation_share=0.5)
    assert [span.path.name for span in files.train] == ["1.bin", "2.bin"]
    assert stream(files.train).tolist() == list(range(60))
    assert stream(files.validation).tolist() == list(range(60, 120))
    window = files.train_samples().batch(0, len(files.train_samples()))
    assert (np.diff(window) == 1).all()


def test_entropy_and_largest_id(tmp_path, cache):
    files = prepare(write_ids(tmp_path / "a.bin", [3, 5, 7, 9] * 10), cache)
    assert files.unigram_entropy == pytest.approx(math.log(4))
    assert files.largest_id == 9
    (tmp_path / "a.txt").write_text("ab\n" * 8)
    assert prepare(tmp_path / "a.txt", cache).largest_id == ord("b")


# --- tokenizers ---


def test_the_byte_tokenizer():
    tokenizer = load_tokenizer(DataSpec())
    assert tokenizer.num_ids == 256
    assert tokenizer.encode("é\n").tolist() == [0xC3, 0xA9, 10]
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]
    assert tokenizer.decode([0xC3]) == tokenizer.decode([300]) == tokenizer.decode([-1]) == "\ufffd"
    assert tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud800")


def test_a_tokenizer_file(tmp_path, docs, cache):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(DataSpec(tokenizer=str(path)))
    assert 258 <= tokenizer.num_ids <= 300
    assert tokenizer.end_of_text == (0,)
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]  # neither truncated nor begun with a token
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS[:2])] == [
        tokenizer.encode(text).tolist() for text in TEXTS[:2]
    ]
    model = ModelSpec(sequence=4, vocab=tokenizer.num_ids)
    files = prepare(docs, cache, model=model, tokenizer=str(path), begin_token="none")
    assert files.train[0].dtype == "<u2"
    assert tokenizer.decode(stream(files.train)) == "".join(text + "<|endoftext|>" for text in TEXTS)
    assert (stream(files.train) == 0).sum() == len(TEXTS)


def test_a_tokenizer_without_an_end_of_text_adds_nothing(tmp_path, docs, cache):
    path = write_tokenizer(tmp_path / "tokenizer.json", end_of_text="<start>")
    tokenizer = load_tokenizer(DataSpec(tokenizer=str(path)))
    assert tokenizer.end_of_text == ()
    files = prepare(docs, cache, model=ModelSpec(sequence=4, vocab=300), tokenizer=str(path), begin_token="none")
    assert tokenizer.decode(stream(files.train)) == "".join(TEXTS)


# --- train and validation ---


def test_documents_are_held_out_whole(docs, cache):
    files = prepare(docs, cache, validation_share=0.3)
    assert files.split == "documents"
    held_out = text_of(files.validation)
    assert sorted(joined([text]) in held_out for text in TEXTS).count(True) == held_out.count("document")
    assert 0 < held_out.count("document") < 24
    assert joined([text for text in TEXTS if text not in held_out]) == text_of(files.train)


def test_the_split_is_the_same_on_every_machine_and_for_every_seed(docs, tmp_path, cache):
    here = prepare(docs, cache, validation_share=0.3)
    moved = tmp_path / "elsewhere" / "corpus"
    shutil.copytree(docs, moved)
    there = prepare(moved, tmp_path / "other", validation_share=0.3, seed=99)
    globbed = prepare(moved / "*.txt", tmp_path / "other", validation_share=0.3)
    assert text_of(here.validation) == text_of(there.validation) == text_of(globbed.validation)
    assert (here.seed, there.seed) == (0, 99)


def test_new_documents_leave_the_old_on_their_side(docs, cache):
    before = text_of(prepare(docs, cache, validation_share=0.3).validation)
    for number in range(20):
        (docs / f"new{number}.txt").write_text(f"brand new {number}")
    after = text_of(prepare(docs, cache, validation_share=0.3).validation)
    assert after.startswith(before)
    assert "document" not in after.removeprefix(before)


def test_a_larger_share_holds_out_more_of_the_same(docs, cache):
    few, many = (
        set(text_of(prepare(docs, cache, validation_share=share).validation).split("document")) for share in (0.2, 0.6)
    )
    assert few < many


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.999])
def test_of_one_document_the_tail_is_held_out(tmp_path, cache, share):
    (tmp_path / "a.txt").write_text("0123456789" * 20)
    files = prepare(tmp_path / "a.txt", cache, validation_share=share)
    assert files.split == "tail"
    assert text_of(files.train) + text_of(files.validation) == "0123456789" * 20 + "\n"
    assert files.num_validation_tokens == min(max(round(201 * share), 5), 196)
    assert len(files.train_samples()) >= 1
    assert len(files.validation_samples()) >= 1


def test_few_documents_fall_back_to_the_tail(docs, cache):
    files = prepare(docs / "0[0-3].txt", cache, validation_share=0.0001)
    assert files.split == "tail"
    assert files.num_validation_tokens == 5
    # The same cached tokens serve a longer window.
    longer = prepare(docs / "0[0-3].txt", cache, validation_share=0.0001, model=ModelSpec(sequence=20))
    assert longer.num_validation_tokens == 21
    assert len(list(cache.glob("*.json"))) == 1


# --- faults ---


def broken(tmp_path, name, contents):
    path = tmp_path / name
    path.write_bytes(contents)
    return path


def test_a_path_that_is_not_there(tmp_path, cache):
    (fault,) = faults_of(tmp_path / "nothing.txt", cache)
    assert "nothing.txt" in fault
    assert "looked from" in fault
    assert "python-stdlib" in fault
    (fault,) = faults_of(tmp_path / "*.txt", cache)
    assert "matches nothing" in fault
    assert "name a folder" in fault
    (tmp_path / "only").mkdir()
    (fault,) = faults_of(tmp_path / "onl*", cache)
    assert "matches folders and no file" in fault
    (fault,) = faults_of("", cache)
    assert "it is empty" in fault
    (fault,) = faults_of("a\0b", cache)
    assert "null byte" in fault
    (fault,) = faults_of("x" * 5000, cache)
    assert "too long" in fault
    assert not cache.exists()


def test_what_is_empty(tmp_path, cache):
    (fault,) = faults_of(broken(tmp_path, "a.txt", b""), cache)
    assert "a.txt is empty (0 bytes); name files with text" in fault
    (tmp_path / "folder").mkdir()
    (fault,) = faults_of(tmp_path / "folder", cache)
    assert "holds no files" in fault
    for name in ("b.bin", "c.txt"):
        broken(tmp_path / "folder", name, b"")
    assert any("all 2 files" in fault for fault in faults_of(tmp_path / "folder", cache))
    (fault,) = faults_of(broken(tmp_path, "blank.jsonl", b"\n\n"), cache)
    assert "holds 0 tokens" in fault


def test_what_is_not_a_file(tmp_path, cache):
    folder = tmp_path / "docs"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    faults = faults_of(folder, cache)
    assert len(faults) == 2
    assert "gone can't be read: No such file" in faults[0]
    assert "pipe is not a regular file" in faults[1]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.unknown"])
def test_binary_where_text_is_expected(tmp_path, cache, name):
    (fault,) = faults_of(broken(tmp_path, name, b" \n   567\0"), cache)
    assert f"{name} is not text: byte 8 is NUL; save it as UTF-8, set data.format" in fault
    (fault,) = faults_of(broken(tmp_path, name, b' \n{"text": "\xff"}'), cache)
    assert f"{name} is not UTF-8 text: invalid start byte at byte 12 (0xff)" in fault
    (fault,) = faults_of(broken(tmp_path, name, b'\xef\xbb\xbf "\xc3'), cache)
    assert "unexpected end of data at byte 5" in fault


def test_where_a_large_file_is_binary(tmp_path, cache):
    contents = "é".encode() * 1_500_000
    (fault,) = faults_of(broken(tmp_path, "a.txt", contents[:2_400_001] + b"\xe9" + contents), cache)
    assert "at byte 2400000 " in fault  # half an é
    (fault,) = faults_of(broken(tmp_path, "a.txt", contents + b"\0"), cache)
    assert "byte 3000000 is NUL" in fault
    (fault,) = faults_of(broken(tmp_path, "a.txt.gz", b"\x1f\x8b\x08\0\0"), cache)
    assert "unpack it first" in fault


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "a"', "line 2 is not JSON"),
        (b'["text"]', 'line 2 is of type list; each line must be an object such as {"text"'),
        (b'{"body": "a", "id": 1}', "no field 'text'; it has 'body', 'id': set data.text_field"),
        (b"{}", "no field 'text'; it has none at all"),
        (b'{"messages": [], "id": 1}', "'messages' is of chats, which data.chats = true reads"),
        (b'{"prompt": "a", "completion": "b"}', "'prompt' and 'completion' are of chats, which data.chats = true"),
        (b'{"instruction": "a", "input": "", "output": "b"}', "as Alpaca's rows: write them as 'prompt'"),
        (b'{"text": 5}', "line 2: field 'text' is of type int, not a string; set data.text_field"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": "\\ud800"}', "half a surrogate pair ('\\ud800') at character 0; mend that record"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b"9" * 5000, "line 2 is not JSON"),
    ],
)
def test_a_bad_line_of_jsonl(tmp_path, cache, line, fault):
    path = broken(tmp_path, "a.jsonl", b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    faults = faults_of(path, cache)
    assert len(faults) == 1
    assert fault in faults[0]
    assert "a.jsonl" in faults[0]
    assert not list(cache.iterdir())  # no temporary files either


def test_tables_are_no_text(tmp_path, cache):
    folder = tmp_path / "docs"
    folder.mkdir()
    broken(folder, "a.csv", b"text,id\nhello,1\n" * 100)
    (fault,) = faults_of(folder, cache)
    assert "a.csv is a table whose rows are not read here; write it as JSONL" in fault
    assert prepare(folder / "a.csv", cache, format="text").num_documents == 1
    broken(folder, "b.txt", b"words " * 100)
    assert "tables such as a.csv are read as raw text" in " ".join(prepare(folder, cache).notes)


def test_all_faults_are_listed_up_to_a_limit(tmp_path, cache):
    folder = tmp_path / "docs"
    folder.mkdir()
    broken(folder, "1.jsonl", b'{"text": 1}\n{"text": "fine"}\n{')
    broken(folder, "2.txt", b"a\0b")
    broken(folder, "3.parquet", b"PAR1 not really")
    faults = faults_of(folder, cache)
    assert [part in fault for part, fault in zip(["line 1", "line 3", "2.txt", "3.parquet"], faults, strict=True)]
    broken(folder, "1.jsonl", b'{"body": 1}\n' * 1000)
    faults = faults_of(folder, cache)
    assert len(faults) == 3 and faults[0].endswith("set data.text_field to one of them (and so in at least 9 more)")
    broken(folder, "1.jsonl", b"".join(b'{"body": 1, "n%d": 2}\n' % number for number in range(1000)))
    faults = faults_of(folder, cache)
    assert len(faults) == 11
    assert faults[-1] == "reading stopped after 10 faults; there may be more behind them"


def test_broken_parquet(tmp_path, cache):
    (fault,) = faults_of(broken(tmp_path, "a.parquet", b"not parquet"), cache)
    assert "a.parquet is a broken parquet file" in fault
    path = write_parquet(tmp_path / "b.parquet", {"id": list(range(40)), "body": TEXTS})
    (fault,) = faults_of(path, cache)
    assert "b.parquet has no column 'text'; it has 'id', 'body': set data.text_field to one of them" in fault
    faults = faults_of(path, cache, text_field="id")
    assert "row 1: field 'id' is of type int, not a string" in faults[0]
    path = write_parquet(tmp_path / "c.parquet", {"text": ["a", None, "c"]})
    (fault,) = faults_of(path, cache)
    assert "row 2: field 'text' is null" in fault
    path = write_parquet(tmp_path / "d.parquet", {"text": [text * 50 for text in TEXTS]})
    contents = bytearray(path.read_bytes())
    contents[60:400] = bytes(340)
    (fault,) = faults_of(broken(tmp_path, "d.parquet", bytes(contents)), cache)
    assert "d.parquet is a broken parquet file" in fault


def test_token_files_that_do_not_fit(tmp_path, cache):
    (fault,) = faults_of(broken(tmp_path, "a.bin", b"12345"), cache)
    assert "a.bin has 5 bytes, which is no whole number of uint16 ids (5 = 2 x 2 + 1); set data.token_dtype" in fault
    path = write_ids(tmp_path / "b.bin", [1, 2, 700, 999, 3])
    (fault,) = faults_of(path, cache)
    assert "b.bin: token 2 is id 700, and model.vocab = 256 means ids 0 to 255" in fault
    assert "use model.vocab = 1000 or another tokenizer" in fault
    assert prepare(path, cache, model=ModelSpec(sequence=4, vocab=1000)).largest_id == 999
    assert faults_of(path, cache) == [fault]  # though another vocabulary has been cached
    path = write_ids(tmp_path / "c.bin", [1, 2, -3, 4], "<i4")
    (fault,) = faults_of(path, cache, token_dtype="int32")
    assert "token 2 is id -3" in fault
    assert "never negative: set data.token_dtype" in fault
    assert len(faults_of(tmp_path / "[ab].bin", cache)) == 1  # the size shows before any id is read


def test_the_position_of_a_bad_token_in_a_long_file(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("shardwright.train.data.token_stream._CHUNK_TOKENS", 10)
    path = write_ids(tmp_path / "a.bin", [1] * 37 + [300] + [1] * 5 + [400])
    (fault,) = faults_of(path, cache)
    assert "token 37 is id 300" in fault
    assert "model.vocab = 401" in fault


def test_broken_numpy_files(tmp_path, cache):
    (fault,) = faults_of(broken(tmp_path, "a.npy", b"not numpy"), cache)
    assert "a.npy is a broken .npy file" in fault
    for name, array in {"b": np.ones((4, 4), np.int64), "c": np.ones(9), "d": np.ones(9, bool)}.items():
        np.save(tmp_path / f"{name}.npy", array)
        (fault,) = faults_of(tmp_path / f"{name}.npy", cache)
        assert f"{name}.npy is an array of {array.dtype} and shape {array.shape}" in fault
        assert "save array.reshape(-1)" in fault
    np.save(tmp_path / "e.npy", np.arange(90))
    (fault,) = faults_of(broken(tmp_path, "e.npy", (tmp_path / "e.npy").read_bytes()[:300]), cache)
    assert "e.npy is a broken .npy file" in fault
    np.save(tmp_path / "f.npy", np.array([{}], object), allow_pickle=True)
    assert "f.npy is a broken .npy file" in faults_of(tmp_path / "f.npy", cache)[0]
    np.save(tmp_path / "g.npy", np.array([], np.int64))
    assert faults_of(tmp_path / "g.npy", cache)


def test_token_files_beside_text(docs, cache):
    write_ids(docs / "x.bin", range(9))
    (fault,) = faults_of(docs, cache)
    assert "token files (x.bin) beside text (00.txt)" in fault
    assert "name one kind by a glob such as FOLDER/*.bin" in fault


def test_tokenizer_faults_come_with_those_of_the_path(tmp_path, docs, cache):
    faults = faults_of(tmp_path / "nothing", cache, tokenizer=str(tmp_path / "gpt2"))
    assert len(faults) == 2
    assert "nothing" in faults[0]
    assert "gpt2" in faults[1]
    assert 'data.tokenizer = "bytes"' in faults[1]
    (fault,) = faults_of(docs, cache, tokenizer=str(tmp_path))
    assert "is a folder; name the tokenizer.json in it" in fault
    for contents in (b"{}", b"not json", b"\xff"):
        (fault,) = faults_of(docs, cache, tokenizer=str(broken(tmp_path, "t.json", contents)))
        assert "t.json" in fault
        assert "name a tokenizer.json" in fault
    with pytest.raises(PlanError):
        load_tokenizer(DataSpec(tokenizer="a\0b"))


def test_text_for_weights_whose_tokenizer_is_not_named(tmp_path, docs, cache):
    model = ModelSpec(sequence=4, weights="released")
    (fault,) = faults_of(docs, cache, model=model)
    assert fault.startswith("model.weights released has no tokenizer.json beside it, and text as bytes is not what")
    mixed = [{"path": str(docs)}, {"path": str(write_ids(tmp_path / "a.bin", np.arange(100)))}]
    (fault,) = faults_of(docs, cache, model=model, sources=mixed)
    assert fault.startswith("data.sources[0]: model.weights released")
    assert prepare(docs, cache, model=model, tokenizer="bytes").train
    assert prepare(tmp_path / "a.bin", cache, model=model).train


def test_text_that_the_tokenizer_cannot_encode(tmp_path, docs, cache):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"document": 0}, unk_token="[UNK]")).save(str(tmp_path / "words.json"))
    (fault,) = faults_of(docs, cache, tokenizer=str(tmp_path / "words.json"))
    assert "can't encode the text" in fault
    assert 'use one with an "unknown" token' in fault
    assert list(cache.iterdir()) == []


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path, docs, cache):
    (fault,) = faults_of(docs, cache, model=ModelSpec(sequence=4, vocab=100))
    assert fault == (
        "tokenizer bytes gives ids 0 to 255, and model.vocab is 100 (256 > 100); "
        "use model.vocab = 256 or another tokenizer"
    )
    path = write_tokenizer(tmp_path / "t.json")
    (fault,) = faults_of(docs, cache, tokenizer=str(path))
    assert "t.json gives ids 0 to" in fault
    # Token files bring their own ids.
    ids = write_ids(tmp_path / "a.bin", range(90))
    assert prepare(ids, cache, model=ModelSpec(sequence=4, vocab=100)).largest_id == 89


def test_too_little_data(tmp_path, cache):
    path = broken(tmp_path, "a.txt", b"0123456789")  # and a newline: 11 tokens
    (fault,) = faults_of(path, cache, model=ModelSpec(sequence=11))
    assert "holds 11 tokens, and training needs model.sequence 11 + 1 = 12 tokens" in fault
    assert "use more text or model.sequence = 10 or less" in fault
    assert prepare(path, cache, model=ModelSpec(sequence=10)).num_train_tokens == 11
    (fault,) = faults_of(path, cache, model=ModelSpec(sequence=5), validation_share=0.1)
    assert "each need model.sequence 5 + 1 = 6 tokens, together 12" in fault
    assert "use more text or model.sequence = 4 or less or data.validation_share = 0" in fault
    files = prepare(path, cache, validation_share=0.1)
    assert len(files.train_samples()) == len(files.validation_samples()) == 1
    ids = write_ids(tmp_path / "a.bin", [1])
    (fault,) = faults_of(ids, cache)
    assert fault.endswith("use more text")


def test_what_the_system_refuses_is_a_fault(docs, cache, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    write_ids(docs / "a.bin", range(9))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        faults = faults_of(docs / "0[01].txt", docs)  # the cache folder is refused, too
        assert "can't be written to" in faults[0]
        (fault,) = faults_of(docs / "a.bin", cache)
        assert "a.bin can't be read: Permission denied; check its permissions" in fault
    opened = Path.open

    def refuse_text(self, *args, **kwargs):
        return refuse(self) if self.suffix == ".txt" else opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse_text)
    faults = faults_of(docs / "0[01].txt", cache)
    assert len(faults) == 2
    assert "00.txt can't be read: Permission denied; check its permissions, or leave it out" in faults[0]


def test_a_cache_folder_that_cannot_be(tmp_path, docs):
    (tmp_path / "cache").write_text("a file")
    (fault,) = faults_of(docs, tmp_path / "cache")
    assert "token files can't be written to" in fault
    assert "name another run.folder" in fault


# --- the cache ---


def test_a_cached_result_is_reused(docs, cache, monkeypatch):
    first = prepare(docs, cache, validation_share=0.3)
    monkeypatch.setattr(token_cache, "read_documents", None)  # would fail if it were called
    assert prepare(docs, cache, validation_share=0.3) == first
    assert prepare(docs, cache, validation_share=0.3, model=ModelSpec(sequence=8)).train == first.train
    names = sorted(path.name for path in cache.iterdir())
    assert len(names) == 5
    assert not any(name.startswith(".") for name in names)


def test_what_the_tokens_depend_on_is_in_the_name(tmp_path, docs, cache):
    prepare(docs, cache)
    prepare(docs, cache, validation_share=0.3)
    prepare(docs / "*.txt", cache)  # the same files
    assert len(list(cache.glob("*.json"))) == 2
    (docs / "00.txt").write_text("changed")
    assert text_of(prepare(docs, cache).train) == joined(["changed", *TEXTS[1:]])
    os.utime(docs / "00.txt", ns=(0, 0))
    prepare(docs, cache)
    assert len(list(cache.glob("*.json"))) == 4
    tokenizer = write_tokenizer(tmp_path / "t.json")
    prepare(docs, cache, tokenizer=str(tokenizer), model=ModelSpec(sequence=4, vocab=300))
    assert len(list(cache.glob("*.json"))) == 5


@pytest.mark.parametrize("damage", ["truncate", "remove", "json", "other json"])
def test_a_damaged_cache_is_made_anew(docs, cache, damage):
    files = prepare(docs, cache)
    path = files.train[0].path
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "remove":
        path.unlink()
    else:
        next(cache.glob("*.json")).write_text('{"a": 1}' if damage == "other json" else "{")
    assert prepare(docs, cache) == files
    assert text_of(files.train) == joined(TEXTS)


def test_an_interrupted_write_leaves_nothing(docs, cache, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(docs, cache)
    assert list(cache.iterdir()) == []

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"No space left on device \(.* free .*\); make room there"):
            prepare(docs, cache)
    assert list(cache.iterdir()) == []
    assert text_of(prepare(docs, cache).train) == joined(TEXTS)


def test_processes_may_prepare_at_once(cache):
    code = (
        "import sys; from pathlib import Path; from shardwright.train.data.prepare import *;"
        "from shardwright.config.data import DataSpec; from shardwright.config.model import ModelSpec;"
        "files = prepare_tokens(DataSpec(), ModelSpec(), 0, Path(sys.argv[1]));"
        "print(files.train_samples().batch(0, 50).sum(), files.validation_samples().batch(3, 1)[0].sum())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(cache)]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(outputs)) == 1
    assert len(list(cache.iterdir())) == 5


# --- the default ---


def test_the_standard_library_is_the_default(cache):
    begin = time.monotonic()
    files = prepare_tokens(DataSpec(), ModelSpec(), 1234, cache)
    assert time.monotonic() - begin < 10
    assert files.split == "documents"
    assert 4_000_000 < files.num_train_tokens + files.num_validation_tokens < 8_100_000
    assert 0.005 < files.num_validation_tokens / files.num_train_tokens < 0.2
    assert 200 < files.num_documents < 2000
    assert b"def " in stream(files.train)[:100_000].astype(np.uint8).tobytes()
    # Text costs less than random bytes, and held-out text about as much as what was counted.
    held_out = files.validation_samples()
    loss = unigram_loss(files.token_shares(256), held_out, len(held_out), marks=False)
    assert abs(loss - files.unigram_entropy) < 0.5
    assert loss < 4 < math.log(256)


def test_the_standard_library_is_capped_evenly():
    files = source_files.find_files(DataSpec(), [])
    names = [file.name for file in files]
    assert sum(file.size_bytes for file in files) <= 8_000_000
    assert not any(part in {"test", "tests", "idlelib", "lib2to3"} for name in names for part in name.split("/"))
    assert {name[0] for name in names} >= set("acemstu")
    assert files == source_files.find_files(DataSpec(), [])


def test_importing_takes_no_heavy_library():
    heavy = "[m for m in ('torch', 'pyarrow', 'tokenizers') if m in sys.modules]"
    code = f"import sys, shardwright.train.data.prepare; print({heavy})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
