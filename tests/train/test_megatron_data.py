"""Megatron's indexed data sets: read where they lie, and checked against what others may have written."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = [[[5, 6], [7]], [[1, 2, 3, 4]], [[9] * 30, [8, 7]], [[0]]]


def write_pair(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16", **header: Any) -> None:
    """A data set of documents of sequences of ids; `header` is what its index says instead of the truth."""
    sequences = [sequence for document in documents for sequence in document]
    np.concatenate([np.array(one, dtype) for one in sequences]).tofile(prefix.with_name(prefix.name + ".bin"))
    sizes = np.array([len(one) for one in sequences], "<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1].astype("<i8") * np.dtype(dtype).itemsize)]).astype("<i8")
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype("<i8")
    printed = {"magic": b"MMIDIDX\x00\x00", "version": 1, "code": CODES[dtype], "sequences": len(sizes)} | header
    head = struct.pack(
        "<9sQBQQ", printed["magic"], printed["version"], printed["code"], printed["sequences"], len(bounds)
    )
    parts = (printed.get("sizes", sizes), printed.get("pointers", pointers), printed.get("bounds", bounds))
    tail = b"".join(np.asarray(part, kind).tobytes() for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True))
    prefix.with_name(prefix.name + ".idx").write_bytes(head + tail + printed.get("behind", b""))


def prepared(path: Path | str, folder: Path, **fields: Any) -> TokenFiles:
    data = DataSpec(path=str(path), **({"validation_share": 0.0} | fields))
    files = prepare_tokens(data, ModelSpec(sequence=8), 1, folder / "cache")
    assert isinstance(files, TokenFiles)
    return files


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("named", ["set", "set.bin", "set.idx", "", "set.*"])
def test_a_pair_is_read_in_place(tmp_path: Path, dtype: str, named: str) -> None:
    (tmp_path / "data").mkdir()
    write_pair(tmp_path / "data" / "set", DOCUMENTS, dtype)
    for _ in range(2):  # made, and found in the cache
        files = prepared(tmp_path / "data" / named, tmp_path, separate_documents=True)
        ids = [i for document in DOCUMENTS for sequence in document for i in sequence]
        assert [span.path.name for span in files.train] == ["set.bin"]
        assert files.train[0].open().tolist() == ids
        assert files.train[0].document_starts().tolist() == [0, 3, 7, 39]
        assert files.num_documents == 4
        first = files.train_samples().batch(0, len(files.train_samples()))
        assert (first < 0).sum() == 3  # the last document is beyond the last window
    assert not list((tmp_path / "cache").glob("*train*"))


def test_several_pairs_and_an_empty_document(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2, 3]], [], [[4, 5]]])
    write_pair(tmp_path / "b", [[[6] * 9], [[]]], "int32")
    files = prepared(tmp_path, tmp_path, split="train")
    assert [span.num_tokens for span in files.train] == [5, 9]
    assert [span.document_starts().tolist() for span in files.train] == [[0, 3], [0]]
    assert files.num_documents == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin as the index of a Megatron data set"),
        ({"version": 2}, "is of version 2, and version 1 is read"),
        ({"code": 7}, "the code of the ids' type is 7, float32, and token ids are integers"),
        ({"code": 99}, "is 99, none that Megatron writes; known are 1 (uint8)"),
        ({"code": 4}, "sequence 1 begins at byte 4, and those before it end at 8"),
        ({"sequences": 2**60}, "8 x 5 = 13,835,058,055,282,163,786; copy it again, whole"),
        ({"behind": b"1"}, "copy it again, whole"),
        ({"behind": b"\x00" * 6}, "what they show beside text"),
        ({"sizes": [2, 1, 4, -30, 2, 1]}, "sequence 3 has -30 tokens"),
        ({"sizes": [2, 1, 4, 30, 2, 2]}, "has 80 bytes, and its index speaks of 82"),
        ({"pointers": [0, 4, 6, 14, 2**62, 78]}, "sequence 4 begins at byte 4,611,686,018,427,387,904"),
        ({"bounds": [0, 2, 3, 9, 6]}, "documents lie between sequences 0, 2, 3, 9 ..., and these must rise"),
        ({"bounds": [1, 2, 3, 4, 6]}, "must rise from 0 to the number of sequences, 6"),
    ],
)
def test_what_others_may_have_written(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    write_pair(tmp_path / "set", DOCUMENTS, **wrong)
    with pytest.raises(PlanError) as caught:
        prepared(tmp_path / "set", tmp_path)
    (fault,) = caught.value.faults
    assert message in fault


def test_ids_outside_the_vocabulary_and_files_that_are_gone(tmp_path: Path) -> None:
    write_pair(tmp_path / "set", [[[5, 300, 6] * 5]])
    with pytest.raises(PlanError, match=r"token 1 is id 300, and model.vocab = 256"):
        prepared(tmp_path / "set", tmp_path)
    write_pair(tmp_path / "less", [[[5, -1] * 9]], "int16")
    with pytest.raises(PlanError, match=r"token 1 is id -1"):
        prepared(tmp_path / "less", tmp_path)
    (tmp_path / "set.idx").unlink()
    with pytest.raises(PlanError, match=r"set.idx can't be read: No such file"):
        prepared(tmp_path / "set.bin", tmp_path, format="megatron")
    (tmp_path / "set.idx").write_bytes(b"")
    with pytest.raises(PlanError, match="does not begin as the index"):
        prepared(tmp_path / "set.bin", tmp_path)
    # Ids and nothing else, whatever lies beside them.
    assert prepared(tmp_path / "set.bin", tmp_path, format="tokens", token_dtype="uint8").num_train_tokens == 30
