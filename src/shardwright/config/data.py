"""The data: the sources of tokens, a single one or a mixture of several."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import SectionSpec, Spec
from shardwright.config.field_types import DayOrNone, PlainName, Positive, Probability

STDLIB = "python-stdlib"
BeginToken = Literal["auto", "none", "always"]
# The name of the set that data.validation_share holds out, beside the sets of data.validation.
HELD_OUT = "held-out"


class ReadSpec(Spec):
    """The files of one source and the fields to read in them: everything in which sources of a mixture can differ."""

    path: str = Field(description="A file, a folder or a glob; python-stdlib is the source of the standard library.")
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tokens", "megatron"] = Field(
        "auto", description="Format of the files; auto goes by their endings."
    )
    split: str = Field(
        "train", description="Of a folder whose files are named after splits, the one to read; all means every file."
    )
    text_field: str = Field("text", description="Name of the field of text in JSONL, parquet and Arrow files.")
    chats: bool = Field(
        False, description="Rows are chats, with messages, conversations, or prompt and completion, and not text."
    )
    token_dtype: Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"] = Field(
        "auto",
        description="Number type of a token file (.bin) without an index; auto is uint16 if that counts the "
        "vocabulary, else uint32, or what the file looks like.",
    )
    end_of_document: Annotated[int, Field(ge=-1, lt=largest.VOCAB)] = Field(
        -1, description="Token files: the id that ends each document; -1 means that a file is one document."
    )


class SourceSpec(ReadSpec):
    """One source of a mixture."""

    weight: Positive = Field(1.0, description="Share of the samples: this weight over the sum of all sources' weights.")


class ValidationSpec(ReadSpec):
    """A user's validation set: all of it is evaluated, and none of it is trained on."""

    name: PlainName = Field(
        "validation", description="Name of the set in metrics and progress lines, and for checkpoint.keep_best."
    )


class DataSpec(ReadSpec, SectionSpec):
    """The sources of tokens, and how they are read."""

    path: str = Field(
        STDLIB, description="A file, a folder or a glob; python-stdlib is the source of the standard library."
    )
    sources: Annotated[list[SourceSpec], Field(max_length=largest.SOURCES)] = Field(
        [], description="Sources that are mixed by weight, in place of data.path and what is read there."
    )
    validation: Annotated[list[ValidationSpec], Field(max_length=largest.SOURCES)] = Field(
        [],
        description="Sets that are evaluated and not trained on, beside what data.validation_share holds out: each has "
        "a name, a path and what is read there.",
    )
    tokenizer: str = Field(
        "bytes", description="bytes, or the path of a tokenizer.json of Hugging Face tokenizers, or of its folder."
    )
    begin_token: BeginToken = Field(
        "auto",
        description="Texts, and prompts, begin with a token such as <s>: auto as the tokenizer itself does it, or "
        "none, or always.",
    )
    chat_template: str = Field(
        "",
        description="chatml, or the path of the Jinja template that chats are written with; empty means the "
        "tokenizer's.",
    )
    today: DayOrNone = Field(
        "", description="Date that chat templates are told as today's, such as 2026-07-26; empty means none."
    )
    answers_only: bool = Field(
        True, description="Chats: the loss is of what the assistant says alone, up to the token that ends it."
    )
    validation_share: Probability = Field(
        0.05, description="Share of the documents that is held out and only evaluated."
    )
    begin_new: bool = Field(
        False,
        description="A run that goes on with other data than before begins what is new of them at its first sample, "
        "and is not refused.",
    )
    separate_documents: bool = Field(
        False, description="Documents in one sample do not see each other, and no loss is taken where one begins."
    )
    cache: str = Field(
        "", description="Folder of tokens that runs share; empty means that each run keeps its own in run.folder."
    )
    workers: Annotated[int, Field(ge=0, le=largest.WORKERS)] = Field(
        0, description="Processes that turn text into tokens, once; 0 means one for each CPU core."
    )

    @property
    def each(self) -> Sequence["DataSpec"]:
        """The data of each source as a DataSpec of its own; the section itself if it has no `sources`."""
        return [self._read_as(source) for source in self.sources] or [self]

    @property
    def each_validation(self) -> Sequence["DataSpec"]:
        """The data of each set of data.validation as a DataSpec of its own, with nothing held out."""
        return [self._read_as(source).model_copy(update={"validation_share": 0.0}) for source in self.validation]

    @property
    def evaluated(self) -> list[str]:
        """The names of all sets that are evaluated."""
        return [*([HELD_OUT] if self.validation_share else []), *(source.name for source in self.validation)]

    @property
    def has_chats(self) -> bool:
        """True if any source or any set of data.validation has chats."""
        return any(data.chats for data in (*self.each, *self.each_validation))

    def _read_as(self, source: ReadSpec) -> "DataSpec":
        """The section with the files of a source and the fields to read in them."""
        fields = {name: getattr(source, name) for name in ReadSpec.model_fields}
        return self.model_copy(update=fields | {"sources": [], "validation": []})
