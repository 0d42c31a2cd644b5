"""Faults of files of rows, which several readers of them tell."""

from collections.abc import Sequence

from shardwright.config.phrase import both, say
from shardwright.train.data.source_files import SourceFile

_CHAT_COLUMN_SETS = (("messages",), ("conversations",), ("prompt", "completion"))


class FaultError(Exception):
    """A fault that ends the reading of one file; the message is the fault."""


def way_to_text(file: SourceFile) -> str:
    """The way out for a file that is not text."""
    packed = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"}
    if file.path.suffix.lower() in packed:
        return say("unpack it first, set data.format to what it is, or leave it out of data.path")
    return say("save it as UTF-8, set data.format to what it is, or leave it out of data.path")


def present_columns(names: Sequence[str], columns: Sequence[str], file: SourceFile) -> Sequence[str]:
    """The columns that are among `names`. Raises FaultError if none is."""
    if present := [name for name in columns if name in names]:
        return present
    if len(columns) == 1:
        raise FaultError(
            say(
                "{path} has no column {column}; {way_out}",
                path=file.path,
                column=repr(columns[0]),
                way_out=one_of(list(names)),
            )
        )
    others = say("{listed}", listed=tuple(map(repr, names[:12]))) if names else say("none at all")
    raise FaultError(
        say(
            "{path} has none of the columns {columns}, but {others}; name files of chats, or set data.chats to false",
            path=str(file.path),
            columns=tuple(map(repr, columns)),
            others=others,
        )
    )


def refuse_halves(text: str, where: str) -> None:
    """Raises FaultError for a text with a lone surrogate, which UTF-8 can't encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = say(
            "half a surrogate pair ({text}) at character {start}", text=repr(text[error.start]), start=error.start
        )
        raise FaultError(say("{where} has {half}; mend that record, or drop it", where=where, half=half)) from None


def one_of(names: Sequence[str], most_shown: int = 12) -> str:
    """The end of an error message about a missing field: the fields that exist, and which setting reads them."""
    present = say("{listed}", listed=tuple(map(repr, names[:most_shown])))
    if len(names) > most_shown:
        present = say("{present} and {more} more", present=present, more=len(names) - most_shown)
    if chats := next((columns for columns in _CHAT_COLUMN_SETS if {*columns} <= {*names}), None):
        fields = both(tuple(map(repr, chats)))
        if len(chats) == 1:
            return say(
                "it has {present}: {fields} is of chats, which data.chats = true reads, with data.separate_documents = "
                'true, and data.chat_template = "chatml" where the tokenizer has no template',
                present=present,
                fields=fields,
            )
        return say(
            "it has {present}: {fields} are of chats, which data.chats = true reads, with data.separate_documents = "
            "true",
            present=present,
            fields=fields,
        )
    if {"instruction", "output"} <= {*names}:
        return say(
            "it has {present}, as Alpaca's rows: write them as 'prompt' (instruction and input) and 'completion' "
            "(output) for data.chats = true, or set data.text_field to a field of text",
            present=present,
        )
    return (
        say("it has {present}: set data.text_field to one of them", present=present)
        if names
        else say("it has none at all")
    )
