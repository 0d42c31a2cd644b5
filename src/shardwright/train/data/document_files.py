"""The documents in files: a file of text, or a row of one with rows.

A fault is not raised where it is met but appended to a list, so that the caller can report all at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardwright.config.data import DataSpec
from shardwright.config.user_file import FileFault, open_file
from shardwright.train.data.chat_rows import CHAT_COLUMNS, Chat, chat_of
from shardwright.train.data.file_search import unreadable
from shardwright.train.data.progress import ReadPlace
from shardwright.train.data.row_files import (
    Blank,
    Broken,
    FaultError,
    FileRow,
    decoded,
    end_of_character,
    one_of,
    read_rows,
    refuse_halves,
)
from shardwright.train.data.source_files import MOST_FAULTS, SourceFile

# Text is read and tokenized in pieces of about this size, so that memory doesn't grow with a document.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One document: `name` says where in the data it is; `pieces` are its text, to be read once, or it is a chat."""

    name: str
    pieces: Iterable[str] = ()
    chat: Chat | None = None


def read_documents(
    files: Sequence[SourceFile], data: DataSpec, faults: list[str], place: ReadPlace
) -> Iterator[Document]:
    """The documents of `files` in their order; what is wrong goes to `faults`, how far it is to `place`, and reading
    goes on.

    The pieces of a document must be read before the next document is asked for.
    """
    for file in files:
        place.begin(file)
        if file.format == "text":
            yield Document(file.name, _text_pieces(file, faults, place))
        else:
            yield from _of_rows(file, data, faults, place)
        if len(faults) >= MOST_FAULTS:
            faults.append(f"reading stopped after {len(faults)} faults; there may be more behind them")
            return


@contextmanager
def _collect(file: SourceFile, faults: list[str]) -> Iterator[None]:
    """Turn what ends the reading of `file` into a fault."""
    try:
        yield
    except (FaultError, FileFault) as fault:
        faults.append(str(fault))
    except OSError as error:
        faults.append(unreadable(file.path, error))


def _text_pieces(file: SourceFile, faults: list[str], place: ReadPlace) -> Iterator[str]:
    with _collect(file, faults), open_file(file.path) as stream:
        rest, position = b"", 0
        while block := stream.read(_PIECE_BYTES):
            raw = rest + block
            if position == 0 and raw.startswith(b"\xef\xbb\xbf"):  # a byte order mark is not text
                raw, position = raw[3:], 3
            # Cut behind the last line; in a line longer than a piece, in front of a character.
            cut = raw.rfind(b"\n") + 1
            if not cut:
                cut = end_of_character(raw)
            if text := decoded(raw[:cut], file, position):
                yield text
            rest, position = raw[cut:], position + cut
            place.at(position / max(1, file.size_bytes))
        if rest:
            yield decoded(rest, file, position)


def _of_rows(file: SourceFile, data: DataSpec, faults: list[str], place: ReadPlace) -> Iterator[Document]:
    """A document a row."""
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
                    yield Document(row.name, _cut(_text_of(row, data.text_field)))
            except FaultError as fault:
                wrong.add(str(fault), row.where)
            if wrong.number >= MOST_FAULTS or len(faults) >= MOST_FAULTS:
                break
    wrong.conclude()


class _WrongRows:
    """Faults of the rows of a file. One that only says of another row what was said already is counted, for a wrong
    field is so in every row."""

    def __init__(self, faults: list[str]) -> None:
        self.number = 0
        self._faults = faults
        self._told: dict[str, tuple[int, int]] = {}  # by what is wrong: where its fault is, and how often it came

    def add(self, fault: str, where: str) -> None:
        """Add a fault of the present row."""
        self.number += 1
        kind = fault.replace(where, "", 1)
        at, times = self._told.get(kind, (len(self._faults), 0))
        if not times:
            self._faults.append(fault)
        self._told[kind] = at, times + 1

    def conclude(self) -> None:
        """No row follows: say how often each came."""
        for at, times in self._told.values():
            if times > 1:
                more = "at least " if self.number >= MOST_FAULTS else ""
                self._faults[at] += f" (and so in {more}{times - 1} more)"


def _text_of(row: FileRow, text_field: str) -> str:
    """The text of one row. Raises FaultError."""
    record, where = row.record, row.where
    if not isinstance(record, dict):
        kind = f"of type {type(record).__name__}"
        raise FaultError(f'{where} is {kind}; each line must be an object such as {{"{text_field}": "..."}}')
    if text_field not in record:
        raise FaultError(f"{where} has no field {text_field!r}; {one_of(list(record))}")
    value = record[text_field]
    if not isinstance(value, str):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        way_out = "set data.text_field to a field of text, or drop that record"
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            way_out = "token ids are read from .npy or .bin files, or Megatron's: write them there"
        raise FaultError(f"{where}: field {text_field!r} is {kind}, not a string; {way_out}")
    refuse_halves(value, f"{where}: field {text_field!r}")
    return value


def _cut(text: str) -> list[str]:
    """`text` in pieces of at most _PIECE_BYTES characters, cut behind a newline where there is one."""
    pieces, start = [], 0
    while start < len(text):
        stop = start + _PIECE_BYTES
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        pieces.append(text[start:stop])
        start = stop
    return pieces
