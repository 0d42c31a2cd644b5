"""Files of rows: JSON lines, packed or not, parquet, and the Arrow files of `datasets`; a bounded part in memory.

A fault that ends the reading of a file is raised. A fault of one row is given in place of its record.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from shardwright.config.base import error_text
from shardwright.config.phrase import say
from shardwright.config.units import GIB, MIB
from shardwright.config.user_file import open_file
from shardwright.train.data.json_array import BrokenArrayError, array_items
from shardwright.train.data.memory_limit import memory_limit
from shardwright.train.data.packed_files import UNPACKING_ERRORS, begins_with_list, unpacked
from shardwright.train.data.row_faults import FaultError, present_columns, way_to_text
from shardwright.train.data.source_files import SourceFile
from shardwright.train.data.table_sizes import written_bytes

# One record, and one group of rows of a parquet file, must fit into memory several times.
_LONGEST_LINE_BYTES = 16 * MIB
_LARGEST_GROUP_BYTES = 4 * GIB
_BATCH_ROWS, _NESTED_ROWS = 256, 8
# Memory that reading a small file of columns may take; the unpacked size up to which growth is not checked; and the
# largest ratio of unpacked to packed bytes. gzip reaches at most 1,032, and text without endless repetition below 100.
_READING_BYTES, _GROWN_BYTES, _MOST_GROWTH = 384 * MIB, 64 * MIB, 1_100
# Limits on consecutive blank lines: a small packed file can have thousands of millions.
_MOST_BLANK_LINES, _MOST_BLANK_BYTES = 1_000_000, 64 * MIB
_BLANK_LINES_PER_REPORT = 10_000
# Empty rows take almost no byte of a packed file, but some time each. In a file with text each row takes at least a
# byte, so a file with more rows than bytes is refused, if it has more than this number.
_MOST_SHORT_ROWS = 1 << 15


@dataclass(frozen=True)
class FileRow:
    """A row. `name` identifies it within the data, and `where` names its place in error messages. `record` is a dict of
    its columns; in JSON files any value, or `Broken` or `Blank`. `share` is the share of the file read so far."""

    name: str
    where: str
    record: object
    share: float = 0.0


@dataclass(frozen=True)
class Broken:
    """A line that is not valid JSON; `fault` is the error message."""

    fault: str


@dataclass(frozen=True)
class Blank:
    """A placeholder for a row, which reports progress while many blank lines are skipped."""


def read_rows(file: SourceFile, columns: Sequence[str]) -> Iterator[FileRow]:
    """The rows of a file in their order. From a table only the present ones of `columns` are read. Raises FaultError,
    FileFault or OSError."""
    if file.format != "jsonl":
        rows = _read_columns(file, columns)
    else:
        rows = _read_array(file) if begins_with_list(file.path) else _read_lines(file)
    most_rows = max(_MOST_SHORT_ROWS, file.size_bytes)
    for number, row in enumerate(rows):
        if number >= most_rows:
            raise FaultError(
                say(
                    "{path} has {size_bytes:,} bytes, and more rows ({rows:,} so far), as no rows with text in them "
                    "have; leave it out of data.path",
                    path=file.path,
                    size_bytes=file.size_bytes,
                    rows=number + 1,
                )
            )
        yield row


def decoded(raw: bytes, file: SourceFile, position: int) -> str:
    """The text of `raw`, which begins at byte `position` of the file. Raises FaultError if it is binary."""
    if (nul := raw.find(b"\0")) >= 0:
        raise FaultError(
            say(
                "{path} is not text: byte {position} is NUL; {way_out}",
                path=file.path,
                position=position + nul,
                way_out=way_to_text(file),
            )
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FaultError(
            say(
                "{path} is not UTF-8 text: {reason} at byte {place} (0x{byte:02x}); {way_out}",
                path=str(file.path),
                reason=error.reason,
                place=position + error.start,
                byte=raw[error.start],
                way_out=way_to_text(file),
            )
        ) from None


def _read_lines(file: SourceFile) -> Iterator[FileRow]:
    """One row for each line. Blank lines are skipped; too many consecutive ones raise FaultError."""
    with open_file(file.path) as packed, unpacked(file.path, packed) as stream:
        position = num_blank = blank_bytes = 0
        for number, raw in enumerate(iter(lambda: _line(file, stream), b""), 1):
            if len(raw) > _LONGEST_LINE_BYTES:
                raise FaultError(
                    say(
                        "{path}, line {number} is longer than {longest_line_bytes:,} bytes; write one record a line, "
                        "and cut longer documents",
                        path=file.path,
                        number=number,
                        longest_line_bytes=_LONGEST_LINE_BYTES,
                    )
                )
            text = decoded(raw, file, position).removeprefix("\ufeff" if number == 1 else "")
            position += len(raw)
            if position > _GROWN_BYTES:
                _refuse_growth(file, position, packed.tell())
            where = f"{file.path}, line {number}"
            if text.strip():
                num_blank = blank_bytes = 0
                share = packed.tell() / max(1, file.size_bytes)
                yield FileRow(f"{file.name}:{number}", where, _parsed(text, where), share=share)
                continue
            num_blank, blank_bytes = num_blank + 1, blank_bytes + len(raw)
            if num_blank > _MOST_BLANK_LINES or blank_bytes > _MOST_BLANK_BYTES:
                raise FaultError(
                    say(
                        "{where} and the {more:,} before it are blank ({blank_bytes:,} bytes); write the file "
                        "without them, or leave it out of data.path",
                        where=where,
                        more=num_blank - 1,
                        blank_bytes=blank_bytes,
                    )
                )
            if num_blank % _BLANK_LINES_PER_REPORT == 0:
                yield FileRow("", where, Blank(), share=packed.tell() / max(1, file.size_bytes))


def _read_array(file: SourceFile) -> Iterator[FileRow]:
    """One row for each item of a file that is a JSON array."""
    with open_file(file.path) as packed, unpacked(file.path, packed) as stream:
        number = 0
        items = array_items(_text_pieces(file, packed, stream), _LONGEST_LINE_BYTES)
        while True:
            number += 1
            where = f"{file.path}, row {number}"
            try:
                record = next(items, _ENDED)
            except BrokenArrayError as error:
                raise FaultError(
                    say(
                        "{where} is not JSON: {reason}; mend it, or write one record a line to a .jsonl file",
                        where=where,
                        reason=error_text(error),
                    )
                ) from None
            if record is _ENDED:
                return
            yield FileRow(f"{file.name}:{number}", where, record, share=packed.tell() / max(1, file.size_bytes))


def _text_pieces(file: SourceFile, packed: BinaryIO, stream: BinaryIO) -> Iterator[str]:
    remainder, position = b"", 0
    while block := _read(file, lambda: stream.read(MIB)):
        raw = remainder + block
        if position == 0 and raw.startswith(b"\xef\xbb\xbf"):
            raw, position = raw[3:], 3
        end = end_of_character(raw)
        if text := decoded(raw[:end], file, position):
            yield text
        remainder, position = raw[end:], position + end
        _refuse_growth(file, position, packed.tell())
    if remainder:
        yield decoded(remainder, file, position)


def end_of_character(raw: bytes) -> int:
    """The byte at which the last UTF-8 character of `raw` begins. It may be incomplete, so text is cut before it."""
    last_bytes = range(len(raw) - 1, max(len(raw) - 5, -1), -1)  # a character has up to 4 bytes
    return next((i for i in last_bytes if raw[i] & 0xC0 != 0x80), len(raw))


_ENDED = object()


def _parsed(text: str, where: str) -> object:
    try:
        return cast(object, json.loads(text.rstrip("\r\n")))
    except json.JSONDecodeError as error:  # its own message names a line, too, which is always 1
        return Broken(
            say(
                "{where} is not JSON: {reason} at character {pos}; mend that line, or drop it",
                where=where,
                reason=error.msg,
                pos=error.pos,
            )
        )
    except (ValueError, RecursionError) as error:
        return Broken(
            say("{where} is not JSON: {reason}; mend that line, or drop it", where=where, reason=error_text(error))
        )


def _line(file: SourceFile, stream: BinaryIO) -> bytes:
    """The next line, or its first _LONGEST_LINE_BYTES + 1 bytes; empty at the end. Raises FaultError if it can't be
    unpacked."""
    return _read(file, lambda: stream.readline(_LONGEST_LINE_BYTES + 1))


def _read(file: SourceFile, read_bytes: Callable[[], bytes]) -> bytes:
    """The next bytes of a stream. Raises FaultError if it can't be unpacked."""
    try:
        return read_bytes()
    except UNPACKING_ERRORS as error:
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        way_out = say("pack it again, or leave it out of data.path")
        raise FaultError(
            say(
                "{path} is a broken {suffix} file: {reason}; {way_out}",
                path=file.path,
                suffix=file.path.suffix,
                reason=reason,
                way_out=way_out,
            )
        ) from None


def _read_columns(file: SourceFile, columns: Sequence[str]) -> Iterator[FileRow]:
    """The rows of a parquet or Arrow file, with a bounded number of them in memory."""
    import pyarrow as pa

    batches_of = _parquet_batches if file.format == "parquet" else _arrow_batches
    number = num_unpacked_bytes = 0
    with open_file(file.path) as stream:
        try:
            for batch, share in _limited(batches_of(file, stream, columns), file):
                num_unpacked_bytes += _batch_bytes(batch, file, number)
                _refuse_growth(file, num_unpacked_bytes, file.size_bytes)
                names = batch.schema.names
                for values in zip(*(batch.column(i) for i in range(len(names))), strict=True):
                    number += 1
                    record = {name: value.as_py() for name, value in zip(names, values, strict=True)}
                    yield FileRow(f"{file.name}:{number}", f"{file.path}, row {number}", record, share=share)
        # For broken files the library also raises Python's own errors.
        except (pa.ArrowException, UnicodeDecodeError, OSError, ValueError, OverflowError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno:  # from the system; the library's errors have no number
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            way_out = say("write it again, or leave it out of data.path")
            if isinstance(error, MemoryError):
                mib = _reading_bytes(file) / MIB
                reason = say("{reason} (to read it may take {mib:,.0f} MiB)", reason=reason, mib=mib)
            kind = "parquet" if file.format == "parquet" else "Arrow"
            raise FaultError(
                say(
                    "{path} is a broken {kind} file: {reason}; {way_out}",
                    path=file.path,
                    kind=kind,
                    reason=reason,
                    way_out=way_out,
                )
            ) from None


def _parquet_batches(file: SourceFile, stream: BinaryIO, columns: Sequence[str]) -> Iterator[tuple[Any, float]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(stream) as table:
        present = present_columns(table.schema_arrow.names, columns, file)
        metadata = table.metadata
        _check_groups(metadata, file)
        plain = {metadata.schema.column(i).path for i in range(metadata.num_columns)}.intersection(present)
    # Repeated values stay references to a dictionary, since expanded values of a small file could fill the memory. The
    # library has no changing dictionaries for nested columns, so these are read a few rows at a time.
    size = _BATCH_ROWS if plain.issuperset(present) else _NESTED_ROWS
    with pq.ParquetFile(stream, metadata=metadata, read_dictionary=sorted(plain)) as table:
        num_read, num_rows = 0, max(1, metadata.num_rows)
        # In this thread: if a thread of the library's own runs out of memory, the process ends.
        for batch in table.iter_batches(batch_size=size, columns=list(present), use_threads=False):
            num_read += batch.num_rows
            yield batch, num_read / num_rows


def _arrow_batches(file: SourceFile, stream: BinaryIO, columns: Sequence[str]) -> Iterator[tuple[Any, float]]:
    """The batches of an Arrow stream, as `datasets` writes it, or of an Arrow file. The file is memory-mapped, and each
    batch is validated before use."""
    import pyarrow as pa

    is_file = stream.read(6) == b"ARROW1"
    with pa.memory_map(str(file.path)) as mapped:
        options = pa.ipc.IpcReadOptions(use_threads=False)  # as with parquet
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(mapped, options=options)
        present = list(present_columns(reader.schema.names, columns, file))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        for batch in batches:
            chosen = batch.select(present)
            chosen.validate(full=True)
            share = mapped.tell() / max(1, file.size_bytes)
            for start in range(0, chosen.num_rows, _BATCH_ROWS):
                yield chosen.slice(start, _BATCH_ROWS), share


def _limited(batches: Iterator[tuple[Any, float]], file: SourceFile) -> Iterator[tuple[Any, float]]:
    """The batches, each read under a memory limit: a packed page or buffer states its own unpacked size."""
    while True:
        with memory_limit(_reading_bytes(file)):
            if (item := next(batches, None)) is None:
                return
        yield item


def _reading_bytes(file: SourceFile) -> int:
    """The memory that reading a file of columns may take, beside what the process has already."""
    return _READING_BYTES + 8 * file.size_bytes


def _batch_bytes(batch: Any, file: SourceFile, number: int) -> int:
    """The unpacked bytes of a batch that follows `number` rows. Raises FaultError for a row that is too long."""
    columns = [batch.column(i) for i in range(batch.num_columns)]
    num_bytes = sum(map(written_bytes, columns))
    if num_bytes > _LONGEST_LINE_BYTES:
        for row in range(batch.num_rows):
            if (size := sum(written_bytes(column.slice(row, 1)) for column in columns)) > _LONGEST_LINE_BYTES:
                raise FaultError(
                    say(
                        "{path}, row {row} has about {size:,} bytes, and at most {longest_line_bytes:,} are read; "
                        "cut longer documents, or leave it out of data.path",
                        path=file.path,
                        row=number + row + 1,
                        size=size,
                        longest_line_bytes=_LONGEST_LINE_BYTES,
                    )
                )
    return num_bytes


def _refuse_growth(file: SourceFile, num_unpacked: int, num_packed: int) -> None:
    """Raises FaultError if the first `num_packed` bytes of a file unpack to more than any text would."""
    if num_unpacked > max(_GROWN_BYTES, _MOST_GROWTH * num_packed):
        raise FaultError(
            say(
                "{path} has {size_bytes:,} bytes, of which {num_packed:,} have made {num_unpacked:,} of text so far: "
                "more than {most_growth:,} times as many, as no text packs; leave it out of data.path",
                path=file.path,
                size_bytes=file.size_bytes,
                num_packed=num_packed,
                num_unpacked=num_unpacked,
                most_growth=_MOST_GROWTH,
            )
        )


def _check_groups(metadata: Any, file: SourceFile) -> None:
    """Raises FaultError for a row group that is too large for memory."""
    for number in range(metadata.num_row_groups):
        if (size := metadata.row_group(number).total_byte_size) > _LARGEST_GROUP_BYTES:
            raise FaultError(
                say(
                    "{path}: row group {number} has {size:,} bytes, and at most {largest_group_bytes:,} are read at "
                    "once; write it again with smaller row groups (row_group_size of pyarrow's write_table)",
                    path=file.path,
                    number=number,
                    size=size,
                    largest_group_bytes=_LARGEST_GROUP_BYTES,
                )
            )
