"""A CSV file of measured runs, read strictly: its rows with their line numbers, or every fault of its form."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.catalog import did_you_mean
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text

Row = dict[str, str]
NEEDED = ("id", "layers", "hidden", "gpu")  # without these columns no row can be used
_MOST_BYTES, _MOST_ROWS = 16 * MIB, 20_000
_WAY_OUT = "columns are those of benchmarks/truth/README.md"


@dataclass(frozen=True)
class TableLine:
    """A row, and the number of the line that it begins on."""

    number: int
    row: Row

    def where(self) -> str:
        """The name of the place in messages."""
        name = self.row.get("id") or "without id"
        return f"line {self.number}, {name if len(name) <= 60 else name[:57] + '...'}"


def read_lines(path: Path, faults: list[str]) -> list[TableLine]:
    """The rows of a table; faults of single lines go to `faults`. PlanError if the file is not a table."""
    try:
        text = read_text(path, _MOST_BYTES, "CSV file")
    except FileFault as fault:
        raise PlanError(f"file {path}", [str(fault)]) from None
    except OSError as error:
        raise PlanError(f"file {path}", [f"it can't be read: {error.strerror}; check the path"]) from None
    lines = list(_lines(text, path, faults))
    faults += _id_faults(lines)
    return lines


def _id_faults(lines: Sequence[TableLine]) -> list[str]:
    """Faults of rows without an id of their own, by which results are reported."""
    faults, first_line = [], dict[str, int]()
    for line in lines:
        name = line.row["id"]
        if not name.strip():
            faults.append(f"line {line.number}: the row has no id; give it one that no other row has")
        elif not name.isprintable():
            faults.append(f"line {line.number}: id {name[:60]!r} has characters that can't be printed; leave them out")
        elif name in first_line:
            faults.append(f"{line.where()}: line {first_line[name]} has the same id; give one of them another")
        first_line.setdefault(name, line.number)
    return faults


def _lines(text: str, path: Path, faults: list[str]) -> Iterator[TableLine]:
    # strict: without it, a quote that is never closed would make the rest of the file one field
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin, header = 1, None
    try:
        for number, fields in enumerate(reader):
            if header is None:
                header = [name.strip() for name in fields]
                faults += _header_faults(header, path)
                if faults:
                    return
            elif number > _MOST_ROWS:
                faults.append(f"line {begin}: there are more than {_MOST_ROWS:,} rows; divide the table")
                return
            elif fields and len(fields) != len(header):
                faults.append(_length_fault(begin, fields, header))
            elif any(fields):  # a blank line is none
                yield TableLine(begin, dict(zip(header, fields, strict=True)))
            begin = reader.line_num + 1
    except csv.Error as error:
        faults.append(f"line {begin}: {_in_our_words(str(error))}")
        return
    if header is None:
        faults += _header_faults([], path)
    elif begin == 2:
        faults.append(f"{path} is a header without rows; add a line for each run, {_WAY_OUT}")


def _header_faults(header: list[str], path: Path) -> list[str]:
    if not {"id", "layers"} & set(header):
        return [
            f"{path} is not a table of measured runs: it needs a header with id, layers, hidden, gpu, ...; {_WAY_OUT}"
        ]
    faults = [
        f"line 1: the header has no column {name!r}; {did_you_mean(name, header)[:300]}"
        for name in NEEDED
        if name not in header
    ]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    return faults + [f"line 1: the column {name!r} stands there twice; leave one out" for name in twice[:20]]


def _length_fault(number: int, fields: list[str], header: list[str]) -> str:
    name = dict(zip(header, fields, strict=False)).get("id") or "a row"
    if len(fields) < len(header):
        problem = f"{header[len(fields)]!r} and what follows are missing; write commas for what is not known"
    else:
        problem = "there are more than columns; put a field with commas in quotes"
    return f"line {number}, {name[:60]}: it has {len(fields)} fields, and the header {len(header)}: {problem}"


def _in_our_words(error: str) -> str:
    """A message of the csv module, with a way out."""
    if "field larger" in error:
        return (
            f"a field has more than {csv.field_size_limit():,} characters; shorten it, or close a quote that was left "
            "open"
        )
    if "unexpected end" in error:
        return "a quote that opens here is never closed; close it, or write two for one that is meant"
    return f"{error}; put fields with commas or quotes in quotes, and write two for a quote within"
