"""Files of rows of a few hundred bytes that say, or hold, gigabytes: read within a bound, or refused."""

import gzip
import json
import lzma
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.units import GIB, MIB
from shardwright.train.data import row_files
from shardwright.train.data.memory_limit import memory_limit
from shardwright.train.data.row_faults import FaultError
from shardwright.train.data.row_files import read_rows
from shardwright.train.data.source_files import SourceFile
from shardwright.train.data.table_sizes import written_bytes
from support.ranks import PATIENCE_S

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())]))


def source(path: Path, kind: str) -> SourceFile:
    return SourceFile(path, path.name, path.stat().st_size, 0, kind)


def rows_of(path: Path, kind: str, column: str) -> list[Any]:
    return [row.record for row in read_rows(source(path, kind), [column])]


def of_one_text(path: Path, num_rows: int, num_messages: int, text: str) -> Path:
    """Chats whose messages are all one text, which the file has once."""
    one = pa.array([[{"role": "user", "content": text}] * num_messages], MESSAGES)
    with pq.ParquetWriter(path, pa.schema([("messages", MESSAGES)]), compression="zstd") as writer:
        writer.write_table(pa.table({"messages": pa.chunked_array([one] * num_rows)}), row_group_size=num_rows)
    return path


def test_values_of_nested_columns_come_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows of 16 messages of a text of 100 KB: 100 MB written out, and 100 KB in the file."""
    path = of_one_text(tmp_path / "a.parquet", 64, 16, "x" * 100_000)
    monkeypatch.setattr(row_files, "_GROWN_BYTES", 8 * MIB)
    with pytest.raises(FaultError, match=r"of which [0-9,]+ have made 12,\d+,\d+ of text so far: more than 1,100"):
        rows_of(path, "parquet", "messages")
    monkeypatch.setattr(row_files, "_GROWN_BYTES", 2 * GIB)
    before, most = pa.total_allocated_bytes(), 0
    for row in read_rows(source(path, "parquet"), ["messages"]):
        assert isinstance(row.record, dict) and len(row.record["messages"]) == 16
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 32 * MIB


def test_a_row_is_bounded_as_a_line_is(tmp_path: Path) -> None:
    path = of_one_text(tmp_path / "a.parquet", 1, 20, "x" * 1_000_000)
    with pytest.raises(FaultError, match=r"row 1 has about 20,00\d,\d+ bytes, and at most 16,777,216 are read; cut"):
        rows_of(path, "parquet", "messages")


def test_usual_chats_are_read_as_they_were_written(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"{n} and {m}"} for m in range(n % 5)] for n in range(1000)]
    table = pa.table({"messages": pa.array(chats, MESSAGES), "messages.x": list(range(1000))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert [row["messages"] for row in rows_of(tmp_path / "a.parquet", "parquet", "messages")] == chats


READ = """
import re, sys
from contextlib import suppress
from pathlib import Path
import pyarrow.parquet
from shardwright.train.data import row_files
from shardwright.train.data.row_faults import FaultError
from shardwright.train.data.row_files import read_rows
from shardwright.train.data.source_files import SourceFile
row_files._READING_BYTES = 64 << 20
def largest(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before = largest()
for name in sys.argv[1:]:
    path = Path(name)
    try:
        list(read_rows(SourceFile(path, name, path.stat().st_size, 0, path.suffix[1:]), ["text", "messages"]))
    except FaultError as fault:
        print(fault)
for _ in range(20):  # a thread of the library's own that gets no memory would end the process, now and then
    with suppress(FaultError):
        list(read_rows(SourceFile(path := Path(sys.argv[2]), "", path.stat().st_size, 0, "parquet"), ["messages"]))
print(largest() - before)
"""


@pytest.mark.processes
def test_what_says_itself_how_large_it_is_has_so_much_memory(tmp_path: Path) -> None:
    """A packed page of parquet, elements that are not there, and a packed buffer of Arrow, of 4 KB at most, in a
    process whose memory nobody used before."""
    page, elements, buffer = (tmp_path / name for name in ("page.parquet", "elements.parquet", "buffer.arrow"))
    table = pa.table({"text": pa.array(["x" * 100_000_000], pa.large_string())})
    pq.write_table(table, page, compression="zstd", use_dictionary=False)
    with pa.ipc.new_stream(buffer, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    del table
    parts = [pa.nulls(5_000_000, pa.string()), pa.nulls(5_000_000, pa.large_string())]
    messages = pa.StructArray.from_arrays(parts, ["role", "content"])
    many = pa.ListArray.from_arrays(pa.array([0, len(messages)], pa.int32()), messages)
    pq.write_table(pa.table({"messages": many}), elements)
    assert max(path.stat().st_size for path in (page, elements, buffer)) < 4_000
    command = [sys.executable, "-c", READ, *map(str, (page, elements, buffer))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    *faults, grown_mib = done.stdout.splitlines()
    assert len(faults) == 3
    assert all("(to read it may take 64 MiB); write it again" in fault for fault in faults), faults
    assert int(grown_mib) < 96


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_lines_that_no_text_packs_to(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_GROWN_BYTES", MIB)
    monkeypatch.setattr(row_files, "_MOST_GROWTH", 200)
    packed = {"gz": gzip.compress, "xz": lzma.compress}[ending]
    same = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(packed(same * 4000))
    with pytest.raises(FaultError, match=r"have made \d,\d+,\d+ of text so far: more than 200 times as many"):
        rows_of(path, "jsonl", "text")
    path = tmp_path / f"b.json.{ending}"
    path.write_bytes(packed(b"[" + b",".join([same.strip()] * 4000) + b"]"))
    with pytest.raises(FaultError, match="more than 200 times as many"):
        rows_of(path, "jsonl", "text")
    path = tmp_path / f"c.jsonl.{ending}"
    path.write_bytes(packed(b"".join(json.dumps({"text": str(n) * 50}).encode() + b"\n" for n in range(20_000))))
    assert len(rows_of(path, "jsonl", "text")) == 20_000


def test_rows_without_text_are_as_many_as_a_file_has_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file of a few kilobytes can have millions, of which each takes some time."""
    monkeypatch.setattr(row_files, "_MOST_SHORT_ROWS", 1000)
    lines = gzip.compress(b'{"text":""}\n' * 50_000)
    lists = pa.ListArray.from_arrays(pa.array([0] * 50_001, pa.int32()), pa.array([], pa.string()))
    table = pa.table({"messages": lists, "text": pa.array([""] * 50_000)})
    (tmp_path / "a.jsonl.gz").write_bytes(lines)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"[" + b'{"text":""},' * 50_000 + b'{"text":""}]'))
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    for name, kind, column in [("a.jsonl.gz", "jsonl", "text"), ("a.json.gz", "jsonl", "text"),
                               ("a.parquet", "parquet", "text"), ("a.parquet", "parquet", "messages")]:  # fmt: skip
        assert (tmp_path / name).stat().st_size < 10_000
        with pytest.raises(
            FaultError, match=r"has [\d,]+ bytes, and more rows \([\d,]+ so far\), as no rows with text"
        ):
            rows_of(tmp_path / name, kind, column)
    monkeypatch.setattr(row_files, "_MOST_SHORT_ROWS", 50_000)
    assert len(rows_of(tmp_path / "a.jsonl.gz", "jsonl", "text")) == 50_000


@given(st.lists(st.none() | st.text(max_size=20), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_sizes_of_slices_are_those_of_their_rows(texts: list[str | None], start: int, length: int) -> None:
    """Plain columns, columns in a dictionary and nested ones have these sizes, and no less than the text takes."""
    column = pa.array(texts, pa.string())
    nested = pa.array([[{"a": text, "b": None}] * 2 for text in texts], pa.list_(pa.struct({"a": "str", "b": "int8"})))
    mapped = pa.array([[("k", text)] for text in texts], pa.map_(pa.string(), pa.string()))
    for one, times in ((column, 1), (column.dictionary_encode(), 1), (nested, 2), (mapped, 1)):
        part = one.slice(start, length)
        rows = sum(written_bytes(one.slice(row, 1)) for row in range(start, min(start + length, len(one))))
        assert written_bytes(part) == rows
        plain = sum(len((text or "").encode()) for text in texts[start : start + length])
        assert rows >= times * plain


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["x"], pa.string_view()),
        pa.array([["x"]], pa.list_view(pa.string())),
        pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([["x"]])),
    ],
)
def test_values_that_may_share_parts_are_not_read(column: pa.Array, tmp_path: Path) -> None:
    """Views of lists of views could be 1,000^n texts in n kilobytes."""
    with pytest.raises(ValueError, match="are not read here"):
        written_bytes(column)
    table = pa.table({"text": column})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(FaultError, match=r"values of the type .* are not read here; write it again"):
        rows_of(tmp_path / "a.arrow", "arrow", "text")


@pytest.mark.parametrize("kind", ["int64", "float32", "bool", "null", "date32", "timestamp[s]", "decimal128(5, 2)"])
def test_plain_values_have_a_size(kind: str) -> None:
    types = {"null": pa.null(), "timestamp[s]": pa.timestamp("s"), "decimal128(5, 2)": pa.decimal128(5, 2)}
    column = pa.nulls(3, types.get(kind) or kind)
    assert 96 <= written_bytes(column) <= 3 * 64
    assert written_bytes(column.dictionary_encode()) >= 96 or kind == "null"


def test_a_limit_of_memory_is_for_its_block_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with memory_limit(64 * MIB), pytest.raises(MemoryError):
        bytearray(16_384 * MIB)  # more than earlier tests of this process can have freed and kept
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(256 * MIB)) == 256 * MIB
