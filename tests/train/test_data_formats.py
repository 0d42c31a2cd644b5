"""Data in the files and folders in which people have them: Arrow, packed lines, folders of the Hugging Face hub."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.train.data import progress
from shardwright.train.data.folder_layout import split_of
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles

TEXTS = [f"text {n} of some words, number {n * n}" for n in range(700)]


def prepared(path: Path | str, folder: Path, **fields: Any) -> TokenFiles:
    data = DataSpec(path=str(path), **({"validation_share": 0.0} | fields))
    files = prepare_tokens(data, ModelSpec(sequence=8), 1, folder / "cache")
    assert isinstance(files, TokenFiles)
    return files


def text_of(files: TokenFiles) -> str:
    return b"".join(bytes(span.open().tolist()) for span in files.train).decode()


def joined(texts: list[str]) -> str:
    return "".join(text + "\n" for text in texts)


def faults_of(path: Path | str, folder: Path, **fields: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        prepared(path, folder, **fields)
    return caught.value.faults


def write_arrow(path: Path, texts: list[str], is_file: bool = False) -> None:
    """As `datasets` writes it: a stream, some rows a batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    writer = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with writer(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=100)


def write_saved(folder: Path, shards: list[list[str]], **state: Any) -> None:
    """The files that save_to_disk writes."""
    names = [f"data-{n:05d}-of-{len(shards):05d}.arrow" for n in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, texts)
    fields = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(fields | state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}))


@pytest.mark.parametrize("is_file", [False, True])
def test_arrow_is_a_document_a_row(tmp_path: Path, is_file: bool) -> None:
    write_arrow(tmp_path / "a.arrow", TEXTS, is_file)
    files = prepared(tmp_path / "a.arrow", tmp_path)
    assert text_of(files) == joined(TEXTS)
    assert files.num_documents == len(TEXTS)


@pytest.mark.parametrize(
    ("ending", "pack"),
    [(".jsonl", bytes), (".jsonl.gz", gzip.compress), (".jsonl.bz2", bz2.compress), (".jsonl.xz", lzma.compress),
     (".json.zst", lambda raw: pa.Codec("zstd").compress(raw, asbytes=True)), (".ndjson", bytes)],
)  # fmt: skip
def test_lines_of_json_however_they_are_packed(tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]) -> None:
    raw = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()
    packed = tmp_path / f"a{ending}"
    if ending.endswith(".zst"):
        with pa.output_stream(str(packed), compression="zstd") as stream:
            stream.write(raw)
    else:
        packed.write_bytes(pack(raw))
    assert text_of(prepared(packed, tmp_path)) == joined(TEXTS)
    if ending not in (".jsonl", ".ndjson"):
        cut = tmp_path / f"b{ending}"
        cut.write_bytes(packed.read_bytes()[: packed.stat().st_size // 2])
        (fault,) = faults_of(cut, tmp_path)
        assert f"is a broken {cut.suffix} file" in fault and "pack it again" in fault
        (tmp_path / f"c{ending}").write_bytes(b"not packed at all, but long enough for a header")
        (fault,) = faults_of(tmp_path / f"c{ending}", tmp_path)
        assert f"is a broken {cut.suffix} file" in fault


def test_what_datasets_saves(tmp_path: Path) -> None:
    """The files that state.json names, in their order, and none that a map left there; and of several splits, one."""
    folder = tmp_path / "saved"
    write_saved(folder, [TEXTS[:300], TEXTS[300:]])
    write_arrow(folder / "cache-0123456789abcdef.arrow", ["not these"])
    assert text_of(prepared(folder, tmp_path)) == joined(TEXTS)
    several = tmp_path / "several"
    write_saved(several / "train", [TEXTS])
    write_saved(several / "test", [["a text for tests"]])
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    files = prepared(several, tmp_path)
    assert text_of(files) == joined(TEXTS)
    assert files.notes == (
        f'{several}: split train alone is read (1 of 2 files), and not test; data.split = "all" reads every file',
    )
    assert text_of(prepared(several, tmp_path, split="test")) == "a text for tests\n"
    assert len(prepared(several, tmp_path, split="all").train[0].document_starts()) == len(TEXTS) + 1
    (fault,) = faults_of(several, tmp_path, split="validation")
    assert 'of the splits test, train and none of data.split "validation"' in fault


@pytest.mark.parametrize(
    ("state", "message"),
    [('{"_data_files": [{"filename": "../x.arrow"}]}', "names '../x.arrow', which is not in"),
     ("[]", "does not say which files the data are"), ("{", "does not say which files"),
     ('{"_data_files": []}', "has no files of data"),
     ('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": [1]}', "flatten_indices()")],
)  # fmt: skip
def test_a_state_that_says_nothing(tmp_path: Path, state: str, message: str) -> None:
    write_saved(tmp_path / "saved", [TEXTS])
    (tmp_path / "saved" / "state.json").write_text(state)
    assert message in faults_of(tmp_path / "saved", tmp_path)[0]


def test_a_folder_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# About these data")
    (folder / "dataset_infos.json").write_text("{}")
    for n, texts in enumerate((TEXTS[:400], TEXTS[400:])):
        pq.write_table(pa.table({"text": texts}), folder / "data" / f"train-{n:05d}-of-00002.parquet")
    pq.write_table(pa.table({"text": ["held out by its name"]}), folder / "data" / "test-00000-of-00001.parquet")
    assert text_of(prepared(folder, tmp_path)) == joined(TEXTS)
    # A glob is the files that it matches.
    assert text_of(prepared(folder / "data" / "*-00001.parquet", tmp_path)) == "held out by its name\n"


@pytest.mark.parametrize(
    ("name", "split"),
    [("data/train-00000-of-00002.parquet", "train"), ("data/train_sft-00000-of-00003.parquet", "train_sft"),
     ("en/valid.jsonl.gz", "validation"), ("validation/data-00000-of-00001.arrow", "validation"),
     ("c4-train.00000-of-01024.json.gz", "train"), ("contest.jsonl", ""), ("dev.jsonl", "validation"),
     ("test/part-0.parquet", "test"), ("web.jsonl", ""), ("Training_set.jsonl", "train")],
)  # fmt: skip
def test_the_split_in_a_name(name: str, split: str) -> None:
    assert split_of(Path(name)) == split


def test_files_without_a_split_are_trained_on(tmp_path: Path) -> None:
    for name in ("web", "books", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * 5}) + "\n")
    assert text_of(prepared(tmp_path, tmp_path)) == "books" * 5 + "\n" + "web" * 5 + "\n"


def test_a_name_of_the_hub(tmp_path: Path) -> None:
    (fault,) = faults_of("allenai/c4", tmp_path)
    assert "nothing is downloaded" in fault
    assert "hf download --repo-type dataset allenai/c4 --local-dir FOLDER" in fault
    (fault,) = faults_of("texts/a.jsonl", tmp_path)
    assert "hub" not in fault


def test_broken_arrow_files(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", TEXTS)
    raw = (tmp_path / "a.arrow").read_bytes()
    for broken in (b"not arrow", raw[:500], raw[: len(raw) // 2] + b"\xff" * 64 + raw[len(raw) // 2 :]):
        (tmp_path / "a.arrow").write_bytes(broken)
        (fault,) = faults_of(tmp_path / "a.arrow", tmp_path)
        assert "a.arrow is a broken Arrow file" in fault
    write_arrow(tmp_path / "b.arrow", TEXTS)
    (fault,) = faults_of(tmp_path / "b.arrow", tmp_path, text_field="body")
    assert "has no column 'body'; it has 'id', 'text'" in fault


@pytest.mark.long
def test_blank_lines_are_bounded_and_do_not_hide_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file of nothing but newlines ends soon; what lies between rows is told while it is read."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * 3_000_000))
    (fault,) = faults_of(tmp_path / "a.jsonl.gz", tmp_path)
    assert "line 1000001 and the 1,000,000 before it are blank" in fault and "write the file without them" in fault
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((b" " * 2**20 + b"\n") * 70))
    (fault,) = faults_of(tmp_path / "b.jsonl.gz", tmp_path)
    assert "are blank" in fault
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    printed: list[str] = []
    lines = [json.dumps({"text": text}) + "\n" * 25_000 for text in TEXTS[:20]]
    (tmp_path / "c.jsonl").write_text("".join(lines))
    data = DataSpec(path=str(tmp_path / "c.jsonl"), validation_share=0.0)
    prepare_tokens(data, ModelSpec(sequence=8), 1, tmp_path / "cache", tell=printed.append)
    assert len([line for line in printed if "tokens of" in line]) > 40
