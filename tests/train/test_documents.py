"""Documents that share a sequence: where they begin is found in the data, and goes with the tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.config.data import DataSpec
from shardwright.config.load import make_job
from shardwright.config.model import ModelSpec
from shardwright.parallel.context.document_mask import document_numbers, has_target, without_marks
from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.data.prepare import TokenFiles, prepare_tokens


def prepared(folder: Path, **fields: Any) -> TokenFiles:
    data = DataSpec(separate_documents=True, **({"path": str(folder / "text"), "validation_share": 0.0} | fields))
    return prepare_tokens(data, ModelSpec(sequence=8), 1, folder / "cache")


def stream(files: TokenFiles) -> np.ndarray:
    """All windows in file order: the stream, but for what is less than a window."""
    samples = files.train_samples()
    samples.shuffle = False
    return np.concatenate([samples.batch(n, 1)[0][:-1] for n in range(len(samples))])


def write_texts(folder: Path, texts: list[str]) -> None:
    (folder / "text").mkdir()
    for n, text in enumerate(texts):
        (folder / "text" / f"{n}.txt").write_text(text)


def test_documents_of_text(tmp_path: Path) -> None:
    """A newline ends each document and belongs to it; an empty file is none; newlines in a text end nothing."""
    texts = ["one\ntwo", "", "x", "a longer one, of some windows\n", "end"]
    write_texts(tmp_path, texts)
    marked = stream(prepared(tmp_path))
    plain = "".join(text + "\n" for text in texts if text).encode()
    assert bytes(np.where(marked < 0, -1 - marked, marked).tolist()) == plain[: len(marked)]
    starts = np.cumsum([0] + [len(text) + 1 for text in texts if text])
    assert np.flatnonzero(marked < 0).tolist() == [start for start in starts if start < len(marked)]


def test_tail_that_is_held_out(tmp_path: Path) -> None:
    """One side is cut off inside a document: marks stay where documents begin, and the cut is one."""
    write_texts(tmp_path, ["abcdefghijk", "lmnopqrstuvwxyz" * 2, "01234"])
    files = prepared(tmp_path, validation_share=0.0001)
    assert files.split == "tail"
    validation = files.validation_samples()
    assert validation is not None
    begin = files.num_train_tokens
    assert begin == 40
    assert np.flatnonzero(validation.batch(0, 1)[0] < 0).tolist() == [0, 43 - 40]
    assert np.flatnonzero(stream(files) < 0).tolist() == [0, 12]


def test_documents_of_token_files(tmp_path: Path) -> None:
    """Each file begins a document, and so does what follows an id that ends one; without such an id, files alone."""
    (tmp_path / "tokens").mkdir()
    for n, ids in enumerate(([5, 6, 0, 7, 0, 0, 8, 9, 1, 0], [2, 0, 3, 4, 5, 6, 7])):
        np.array(ids, "<u2").tofile(tmp_path / "tokens" / f"{n}.bin")
    fields = {"path": str(tmp_path / "tokens"), "format": "tokens"}
    for _ in range(2):  # made, and found in the cache
        files = prepared(tmp_path, **fields, end_of_document=0)
        assert files.num_documents == 6
        assert np.flatnonzero(stream(files) < 0).tolist() == [0, 3, 5, 6, 10, 12]
    files = prepared(tmp_path, **fields)
    assert files.num_documents == 2
    assert np.flatnonzero(stream(files) < 0).tolist() == [0, 10]


def test_marks_tell_who_is_where_and_what_counts() -> None:
    marked = torch.tensor([[3, 4, -1, 5, -7], [-1, 1, 2, UNCOUNTED + 3, 4]])
    assert without_marks(marked).tolist() == [[3, 4, 0, 5, 6], [0, 1, 2, 3, 4]]
    assert document_numbers(marked).tolist() == [[0, 0, 1, 1, 2], [1, 1, 1, 1, 1]]
    assert has_target(marked, 1).tolist() == [[True, False, True, False], [True, True, False, True]]
    assert has_target(marked, 2).tolist() == [[False, False, False], [True, False, True]]


def test_default_marks_nothing(tmp_path: Path) -> None:
    write_texts(tmp_path, ["some text that is long enough", "and more of it"])
    data = DataSpec(path=str(tmp_path / "text"), validation_share=0.0)
    assert (stream(prepare_tokens(data, ModelSpec(sequence=8), 1, tmp_path / "cache")) >= 0).all()
    assert not make_job({}).data.separate_documents
