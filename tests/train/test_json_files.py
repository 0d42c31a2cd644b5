"""Forms of .json files: rows in an array, rows a line, or text; and arrays that are read item by item."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.train.data import row_files
from shardwright.train.data.json_array import BrokenArrayError, array_items
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles
from shardwright.train.data.source_files import find_files

ROWS = [{"text": f"row {n}, größer ✓ als {n * n}"} for n in range(400)]
CHATS = [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(9)]


def prepared(path: Path, folder: Path, **fields: Any) -> TokenFiles:
    files = prepare_tokens(
        DataSpec(path=str(path), validation_share=0.0, **fields), ModelSpec(sequence=24), 1, folder / "cache"
    )
    assert isinstance(files, TokenFiles)
    return files


def text_of(files: TokenFiles) -> str:
    return b"".join(bytes(span.open().tolist()) for span in files.train).decode()


def fault_of(path: Path, folder: Path, **fields: Any) -> str:
    with pytest.raises(PlanError) as caught:
        prepared(path, folder, **fields)
    (fault,) = caught.value.faults
    return fault


def formats(folder: Path, **fields: Any) -> tuple[dict[str, str], list[str]]:
    faults, notes = list[str](), list[str]()
    files = find_files(DataSpec(path=str(folder), **fields), faults, notes)
    assert not faults
    return {file.name: file.format for file in files}, notes


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_an_array_is_a_document_a_row(
    tmp_path: Path, indent: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MIB", 1000)  # pieces that end within characters
    raw = b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=indent, ensure_ascii=False).encode()
    path = tmp_path / ("a.json.gz" if packed else "a.json")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    files = prepared(path, tmp_path)
    assert files.num_documents == len(ROWS)
    assert text_of(files) == "".join(row["text"] + "\n" for row in ROWS)


def test_rows_are_told_from_text_by_what_a_file_begins_with(tmp_path: Path) -> None:
    """Arrays of objects and lines of objects are rows; a configuration, or a list of numbers, is text."""
    lines = "\n".join(json.dumps(row) for row in ROWS)
    contents = {
        "lines.json": (lines, "jsonl"), "array.json": (json.dumps(ROWS), "jsonl"),
        "settings.json": (json.dumps({"a": {"b": 1}}, indent=1), "text"), "numbers.json": ("[1, 2, 3]", "text"),
        "words.json": ("no JSON at all", "text"), "long.json": (json.dumps({"text": "x" * 200_000}) + "\n", "jsonl"),
    }  # fmt: skip
    for name, (text, kind) in contents.items():
        (tmp_path / name).write_text(text)
        faults: list[str] = []
        (file,) = find_files(DataSpec(path=str(tmp_path / name)), faults)
        assert (file.format, faults) == (kind, []), name


def test_a_folder_of_chats_in_json(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.json").write_text(json.dumps(CHATS))
    (tmp_path / "chats" / "test.json").write_text(json.dumps(CHATS))
    (tmp_path / "chats" / "README.md").write_text("# Chats")
    (tmp_path / "chats" / "dataset_infos.json").write_text("{}")
    result, notes = formats(tmp_path / "chats")
    assert result == {"train.json": "jsonl"} and "split train alone is read" in notes[0]
    assert "has no field 'text'; it has 'messages'" in fault_first(tmp_path / "chats", tmp_path)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    files = prepared(
        tmp_path / "chats", tmp_path, chats=True, separate_documents=True, chat_template=str(tmp_path / "t.jinja")
    )
    assert files.num_documents == len(CHATS)


def fault_first(path: Path, folder: Path) -> str:
    with pytest.raises(PlanError) as caught:
        prepared(path, folder)
    return caught.value.faults[0]


def test_beside_text_json_is_text_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("print()\n")
    (tmp_path / "src" / "package.json").write_text(json.dumps({"name": "x"}, indent=1))
    assert formats(tmp_path / "src") == ({"main.py": "text", "package.json": "text"}, [])
    (tmp_path / "src" / "rows.json").write_text(json.dumps(ROWS))
    result, notes = formats(tmp_path / "src")
    assert set(result.values()) == {"text"}
    assert "rows.json and other .json files are read as text, as main.py is" in notes[0]
    assert formats(tmp_path / "src", format="text")[1] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}, {"text"', "row 2 is not JSON: Expecting ':' delimiter"),
        ('[{"text": "a"} {"text": "b"}]', "row 2 is not JSON: a comma or ] is wanted behind it, and '{' is there"),
        ('[{"text": "a"}', "row 2 is not JSON: a comma or ] is wanted behind it, and the end is there"),
        ('[{"text": "a"}] []', "row 2 is not JSON: more text is behind the array"),
        ('[{"text": "a"}, ]', "row 2 is not JSON: Expecting value"),
        ('[{"text": "a"}, 5]', "row 2 is of type int"),
        ('[{"text": "a"}, ' + "[" * 200_000, "row 2 is not JSON: "),
        ('[{"text": "a"},' + " " * 5000 + "]", "blank"),
        ('[{"text": "' + "x" * 9000 + '"}]', "it is longer than 4,096 characters"),
    ],
)
def test_broken_arrays(tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MIB", 1000)
    monkeypatch.setattr(row_files, "_LONGEST_LINE_BYTES", 4096)
    (tmp_path / "a.json").write_text(text)
    assert message in fault_of(tmp_path / "a.json", tmp_path)


def in_pieces(text: str, size: int) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


VALUES = st.none() | st.integers() | st.text(max_size=8) | st.booleans() | st.floats(0, 1)


@given(
    items=st.lists(st.recursive(VALUES, st.lists, max_leaves=4)),
    size=st.integers(1, 9), indent=st.sampled_from([None, 0, 3]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_items_are_those_of_the_whole(items: list[Any], size: int, indent: int | None) -> None:
    assert list(array_items(in_pieces(json.dumps(items, indent=indent), size), 10_000)) == items


@given(text=st.text('[]{}",: 1ex-', max_size=12), size=st.integers(1, 5))
@example(text="[1:]", size=4)
@settings(max_examples=300, deadline=None)
def test_what_is_no_array_is_refused(text: str, size: int) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if isinstance(expected, list):
        assert list(array_items(in_pieces(text, size), 100)) == expected
    else:
        with pytest.raises(BrokenArrayError):
            list(array_items(in_pieces(text, size), 100))
