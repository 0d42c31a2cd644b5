"""Token files that are read as another type than they were written with: noticed, whatever the two are."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles
from shardwright.train.data.token_stream import TokenStream


def read(path: Path, vocab: int, **data: object) -> TokenFiles:
    answer = DataSpec.model_validate({"path": str(path), "validation_share": 0.0, **data})
    tokens = prepare_tokens(answer, ModelSpec(sequence=8, vocab=vocab), 1, path.parent / "cache")
    assert isinstance(tokens, TokenFiles)
    return tokens


def ids_of(tokens: TokenFiles) -> list[int]:
    row = np.empty(tokens.num_train_tokens, np.int64)
    TokenStream(tokens.train).read(0, row)
    return row.tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([200, 5_000, 50_257, 70_016, 128_256, 1_000_000]),
    st.sampled_from(["u1", "<u2", "<u4", "<i4", "<i8", ">u2", ">u4", ">i8"]),
    st.sampled_from(["auto", "uint8", "uint16", "uint32", "int32", "int64"]),
    st.sampled_from([".bin", ".npy"]),
    st.integers(0, 2**32 - 1),
)
def test_ids_are_those_that_were_written_or_it_is_said(
    tmp_path_factory: pytest.TempPathFactory, vocab: int, written: str, stated: str, ending: str, seed: int
) -> None:
    """Of ids that are spread over the vocabulary; ones with too few bits for it have no file."""
    if np.iinfo(written).max < vocab - 1:
        return
    path = tmp_path_factory.mktemp("ids") / f"ids{ending}"
    ids = np.random.default_rng(seed).integers(0, vocab, 800)
    if ending == ".npy":
        np.save(path, ids.astype(written))
    else:
        path.write_bytes(ids.astype(written).tobytes())
    fault = ""
    try:
        tokens = read(path, vocab, **({} if stated == "auto" else {"token_dtype": stated}))
    except PlanError as error:
        fault = str(error)
    if fault:
        assert ending == ".bin" and ("token_dtype" in fault or "write it" in fault)
        return
    assert ids_of(tokens) == ids.tolist() or "data.token_dtype" in "".join(tokens.notes)


@pytest.mark.parametrize(
    ("vocab", "written", "stated", "fault"),
    [
        (5_000, "<u4", "uint16", 'looks: set data.token_dtype = "uint32"'),
        (5_000, "<i8", "uint16", 'set data.token_dtype = "int64"'),
        (70_016, "<i4", "uint16", 'set data.token_dtype = "uint32"'),
        (200, "<u2", "uint8", 'set data.token_dtype = "uint16"'),
        (256, "<u4", "int64", 'as uint32 its ids are within: set data.token_dtype = "uint32"'),
        (5_000, "<u2", "uint32", 'as uint16 its ids are within: set data.token_dtype = "uint16"'),
        (50_257, ">u2", "uint16", "write it with the lowest byte first"),
        (5_000, ">u4", "auto", "write it with the lowest byte first"),
    ],
)
def test_a_way_out_says_the_type(tmp_path: Path, vocab: int, written: str, stated: str, fault: str) -> None:
    ids = np.random.default_rng(1).integers(0, vocab, 400).astype(written)
    (tmp_path / "ids.bin").write_bytes(ids.tobytes())
    with pytest.raises(PlanError) as caught:
        read(tmp_path / "ids.bin", vocab, token_dtype=stated)
    assert fault.removeprefix("looks: ") in str(caught.value)


def test_a_type_is_chosen_and_told(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 70_000, 400)
    for vocab, written, note in ((70_016, "<i4", "read as uint32"), (5_000, "<i8", "read as int64")):
        (tmp_path / "ids.bin").write_bytes((ids % vocab).astype(written).tobytes())
        tokens = read(tmp_path / "ids.bin", vocab)
        assert ids_of(tokens) == (ids % vocab).tolist()
        assert note in "".join(tokens.notes)
    (tmp_path / "ids.bin").write_bytes((ids % 5_000).astype("<u2").tobytes())
    assert not read(tmp_path / "ids.bin", 5_000).notes
    assert "from 65,536 on are never" in read(tmp_path / "ids.bin", 70_016, token_dtype="uint16").notes[0]


def test_an_array_of_halves_is_refused(tmp_path: Path) -> None:
    """As numpy.frombuffer gives it where it is told the wrong type."""
    ids = np.random.default_rng(1).integers(0, 5_000, 400).astype("<u4")
    np.save(tmp_path / "ids.npy", ids.view("<u2"))
    with pytest.raises(PlanError, match="so do 400 ids of uint32 look: write it again as uint32"):
        read(tmp_path / "ids.npy", 5_000)


def test_few_or_equal_ids_prove_nothing(tmp_path: Path) -> None:
    for ids in ([7, 0] * 8, [0] * 400):
        (tmp_path / "ids.bin").write_bytes(np.array(ids, "<u2").tobytes())
        assert ids_of(read(tmp_path / "ids.bin", 5_000)) == ids
