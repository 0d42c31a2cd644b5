"""The documents in files: each file of text is a document, and each row of a file of rows.

Faults are appended to a list instead of being raised, so that the caller can report all at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardwright.config.base import error_text
from shardwright.config.data import DataSpec
from shardwright.config.phrase import say
from shardwright.config.user_file import FileFault, open_file
from shardwright.train.data.chat_rows import CHAT_COLUMNS, Chat, chat_of
from shardwright.train.data.file_search import unreadable
from shardwright.train.data.progress import ReadPlace
from shardwright.train.data.row_faults import FaultError, one_of, refuse_halves
from shardwright.train.data.row_files import Blank, Broken, FileRow, decoded, end_of_character, read_rows
from shardwright.train.data.source_files import MOST_FAULTS, SourceFile

# Text is read and tokenized in pieces of about this size, so that memory doesn't grow with a document.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One document: `name` identifies it within the data. It is a chat, or its text comes in `pieces`, which are read
    once."""

    name: str
    pieces: Iterable[str] = ()
    chat: Chat | None = None


def read_documents(
    files: Sequence[SourceFile], data: DataSpec, faults: list[str], place: ReadPlace
) -> Iterator[Document]:
    """The documents of `files` in their order. Faults are appended to `faults`, and reading continues; progress goes to
    `place`.

    The pieces of a document must be read before the next document is requested.
    """
    for file in files:
        place.begin(file)
        if file.format == "text":
            yield Document(file.name, _text_pieces(file, faults, place))
        else:
            yield from _row_documents(file, data, faults, place)
        if len(faults) >= MOST_FAULTS:
            faults.append(say("reading stopped after {count} faults; there may be more behind them", count=len(faults)))
            return


@contextmanager
def _collect(file: SourceFile, faults: list[str]) -> Iterator[None]:
    """Turn an exception that ends the reading of `file` into a fault."""
    try:
        yield
    except (FaultError, FileFault) as fault:
        faults.append(error_text(fault))
    except OSError as error:
        faults.append(unreadable(file.path, error))


def _text_pieces(file: SourceFile, faults: list[str], place: ReadPlace) -> Iterator[str]:
    with _collect(file, faults), open_file(file.path) as stream:
        remainder, position = b"", 0
        while block := stream.read(_PIECE_BYTES):
            raw = remainder + block
            if position == 0 and raw.startswith(b"\xef\xbb\xbf"):  # a byte order mark is not text
                raw, position = raw[3:], 3
            # Cut after the last newline; if a line is longer than a piece, between two characters.
            end = raw.rfind(b"\n") + 1
            if not end:
                end = end_of_character(raw)
            if text := decoded(raw[:end], file, position):
                yield text
            remainder, position = raw[end:], position + end
            place.at(position / max(1, file.size_bytes))
        if remainder:
            yield decoded(remainder, file, position)


def _row_documents(file: SourceFile, data: DataSpec, faults: list[str], place: ReadPlace) -> Iterator[Document]:
    """One document for each row."""
    columns = CHAT_COLUMNS if data.chats else [data.text_field]
    wrong = _WrongRows(faults)
    with _collect(file, faults):
        for row in read_rows(file, columns):
            place.at(row.share)
            if isinstance(row.record, Blank):
                continue
            try:
                if isinstance(row.record, Broken):
                    faults.append(row.record.fault)
                elif data.chats:
                    yield Document(row.name, chat=chat_of(row.record, row.where))
                else:
                    yield Document(row.name, _pieces(_text_of(row, data.text_field)))
            except FaultError as fault:
                wrong.add(error_text(fault), row.where)
            if wrong.number >= MOST_FAULTS or len(faults) >= MOST_FAULTS:
                break
    wrong.conclude()


class _WrongRows:
    """Faults of the rows of a file. A fault that occurs in several rows is listed once, with their number: a missing
    field is often missing in every row."""

    def __init__(self, faults: list[str]) -> None:
        self.number = 0
        self._faults = faults
        self._kinds: dict[str, tuple[int, int]] = {}  # by the text without the row: index in the list, and how often

    def add(self, fault: str, where: str) -> None:
        """Add a fault of the present row."""
        self.number += 1
        kind = fault.replace(where, "", 1)
        index, times = self._kinds.get(kind, (len(self._faults), 0))
        if not times:
            self._faults.append(fault)
        self._kinds[kind] = index, times + 1

    def conclude(self) -> None:
        """After the last row: add to each fault in how many more rows it occurs."""
        for index, times in self._kinds.values():
            if times > 1:
                fault, more = self._faults[index], times - 1
                self._faults[index] = (
                    say("{fault} (and so in at least {more} more)", fault=fault, more=more)
                    if self.number >= MOST_FAULTS
                    else say("{fault} (and so in {more} more)", fault=fault, more=more)
                )


def _text_of(row: FileRow, text_field: str) -> str:
    """The text of one row. Raises FaultError."""
    record, where = row.record, row.where
    if not isinstance(record, dict):
        raise FaultError(
            say(
                '{where} is of type {kind}; each line must be an object such as {{"{text_field}": "..."}}',
                where=where,
                kind=type(record).__name__,
                text_field=text_field,
            )
        )
    if text_field not in record:
        raise FaultError(
            say(
                "{where} has no field {text_field}; {way_out}",
                where=where,
                text_field=repr(text_field),
                way_out=one_of(list(record)),
            )
        )
    value = record[text_field]
    if not isinstance(value, str):
        kind = "null" if value is None else say("of type {kind}", kind=type(value).__name__)
        way_out = say("set data.text_field to a field of text, or drop that record")
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            way_out = say("token ids are read from .npy or .bin files, or Megatron's: write them there")
        raise FaultError(
            say(
                "{where}: field {text_field} is {kind}, not a string; {way_out}",
                where=where,
                text_field=repr(text_field),
                kind=kind,
                way_out=way_out,
            )
        )
    refuse_halves(value, f"{where}: field {text_field!r}")
    return value


def _pieces(text: str) -> list[str]:
    """`text` in pieces of at most _PIECE_BYTES characters, cut after a newline if there is one."""
    pieces, start = [], 0
    while start < len(text):
        stop = start + _PIECE_BYTES
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        pieces.append(text[start:stop])
        start = stop
    return pieces
