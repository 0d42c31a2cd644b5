"""A CSV file of measured runs: its lines, each with the faults of its form. Other lines stand beside a faulty one."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.catalog import did_you_mean, written_alike
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text, system_reason
from shardwright.measure.measured_runs.row_facts import COLUMNS

Row = dict[str, str]
NEEDED = ("id", "layers", "hidden", "gpu")  # without these columns no row can be used
_MOST_BYTES, _MOST_ROWS = 16 * MIB, 20_000
_SLIP = 0.8  # similarity from which an unknown column is taken for a known one that is written wrong
_WAY_OUT = say("columns are those of benchmarks/truth/README.md")


@dataclass(frozen=True)
class TableLine:
    """A row, the number of the line that it begins on, and the faults of its form. A line that can't be taken apart has
    at most an id."""

    number: int
    row: Row
    faults: tuple[str, ...] = ()


def read_lines(path: Path) -> list[TableLine]:
    """The lines of a table. PlanError if the file is not a table of runs."""
    try:
        text = read_text(path, _MOST_BYTES, "CSV file")
    except FileFault as fault:
        raise PlanError(say("file {path}", path=str(path)), [error_text(fault)]) from None
    except OSError as error:
        raise PlanError(
            say("file {path}", path=str(path)),
            [say("it can't be read: {reason}; check the path", reason=system_reason(error))],
        ) from None
    return _with_id_faults(list(_lines(text, path)))


def _with_id_faults(lines: Sequence[TableLine]) -> list[TableLine]:
    """The lines, with faults where a row has no id of its own, by which results are reported."""
    first_line = dict[str, int]()
    for line in lines:
        first_line.setdefault(line.row.get("id", ""), line.number)
    return [
        replace(line, faults=(*line.faults, *_id_faults(line, first_line))) if "id" in line.row else line
        for line in lines
    ]


def _id_faults(line: TableLine, first_line: Mapping[str, int]) -> list[str]:
    name = line.row["id"]
    if not name.strip():
        return [say("the row has no id; give it one that no other row has")]
    if not name.isprintable():
        return [say("id {name} has characters that can't be printed; leave them out", name=repr(name[:60]))]
    if first_line[name] != line.number:
        return [say("line {first_line} has the same id; give one of them another", first_line=first_line[name])]
    return []


def _lines(text: str, path: Path) -> Iterator[TableLine]:
    # strict: without it, a quote that is never closed would make the rest of the file one field
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin, header = 1, None
    try:
        for number, fields in enumerate(reader):
            if header is None:
                header = _header(fields, path)
            elif number > _MOST_ROWS:
                yield TableLine(
                    begin, {}, (say("there are more than {most:,} rows; divide the table", most=_MOST_ROWS),)
                )
                return
            elif fields and len(fields) != len(header):
                yield _line_of_other_length(begin, fields, header)
            elif any(fields):  # a blank line is none
                yield TableLine(begin, dict(zip(header, fields, strict=True)))
            begin = reader.line_num + 1
    except csv.Error as error:
        if header is None:
            raise PlanError(
                say("file {path}", path=str(path)),
                [say("line {line}: {problem}", line=begin, problem=_explained(str(error)))],
            ) from None
        yield TableLine(begin, {}, (_explained(str(error)),))
        return
    if header is None:
        _header([], path)
    if begin == 2:
        raise PlanError(
            say("file {path}", path=str(path)),
            [say("{path} is a header without rows; add a line for each run, {way_out}", path=path, way_out=_WAY_OUT)],
        )


def _header(fields: Sequence[str], path: Path) -> list[str]:
    """The names of the columns. PlanError if they are not those of a table of runs."""
    header = [name.strip() for name in fields]
    if faults := _header_faults(header, path):
        raise PlanError(say("file {path}", path=str(path)), faults)
    return header


def _header_faults(header: list[str], path: Path) -> list[str]:
    if not {"id", "layers"} & set(header):
        return [
            say(
                "{path} is not a table of measured runs: it needs a header with id, layers, hidden, gpu, ...; "
                "{way_out}",
                path=path,
                way_out=_WAY_OUT,
            )
        ]
    faults: list[str] = [
        say("line 1: the header has no column {name}; {hint}", name=repr(name), hint=did_you_mean(name, header)[:300])
        for name in NEEDED
        if name not in header
    ]
    faults += [
        say(
            "line 1: there is no column {name}, and nothing would read it; write {meant} if that is meant, or leave it "
            "out",
            name=repr(shortened(name)),
            meant=alike[0],
        )
        for name in header
        if name not in COLUMNS
        and (alike := written_alike(name.lower(), sorted(COLUMNS - set(header)), most=1, share=_SLIP))
    ]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    return faults + [
        say("line 1: the column {name} stands there twice; leave one out", name=repr(name)) for name in twice[:20]
    ]


def _line_of_other_length(number: int, fields: list[str], header: list[str]) -> TableLine:
    """A line whose fields belong to no columns, except that the id may."""
    name = dict(zip(header, fields, strict=False)).get("id", "")
    if len(fields) < len(header):
        problem = say(
            "{column} and what follows are missing; write commas for what is not known",
            column=repr(header[len(fields)]),
        )
    else:
        problem = say("there are more than columns; put a field with commas in quotes")
    fault = say(
        "it has {count} fields, and the header {total}: {problem}",
        count=len(fields),
        total=len(header),
        problem=problem,
    )
    return TableLine(number, {"id": name} if name else {}, (fault,))


def _explained(error: str) -> str:
    """A message of the csv module, with a way out."""
    if "field larger" in error:
        return say(
            "a field has more than {most:,} characters; shorten it, or close a quote that was left open",
            most=csv.field_size_limit(),
        )
    if "unexpected end" in error:
        return say("a quote that opens here is never closed; close it, or write two for one that is meant")
    return say(
        "{reason}; put fields with commas or quotes in quotes, and write two for a quote within",
        reason=error,
    )
