"""Check that the fields of the data section agree. Facts of the files are checked where files are read."""

from shardwright.config.data import HELD_OUT, DataSpec, ReadSpec
from shardwright.config.phrase import say

_WITHOUT_ROWS = ("text", "tokens", "megatron")


def data_faults(data: DataSpec) -> list[str]:
    """All faults of a data section whose fields are each valid."""
    faults = _mixture_faults(data)
    for number, source in enumerate(data.each):
        name = f"data.sources[{number}]" if data.sources else "data"
        faults += _source_faults(source, name)
    faults += _validation_faults(data)
    if data.chat_template and not data.has_chats:
        faults.append(
            say(
                "data.chat_template {chat_template} is what chats are written with, and there are none; set "
                "data.chats to true, or leave data.chat_template out",
                chat_template=repr(data.chat_template),
            )
        )
    if data.begin_token == "always" and data.tokenizer == "bytes":
        faults.append(
            say(
                'data.begin_token is "always", and bytes have no token that begins a text: all 256 ids are bytes; '
                "name a tokenizer in data.tokenizer, or leave data.begin_token out"
            )
        )
    if data.today and not data.has_chats:
        faults.append(
            say(
                "data.today {today} is what templates of chats are told, and there are none; set data.chats to true, "
                "or leave data.today out",
                today=repr(data.today),
            )
        )
    if not data.answers_only and not data.has_chats:
        faults.append(
            say(
                "data.answers_only is false, and only of chats does the loss leave something out; set data.chats to "
                "true, or leave data.answers_only out"
            )
        )
    return faults


def _mixture_faults(data: DataSpec) -> list[str]:
    """Faults of fields that belong to a single source, in a section with several sources."""
    if not data.sources:
        return []
    changed = [name for name in ReadSpec.model_fields if getattr(data, name) != DataSpec.model_fields[name].default]
    return [
        say("data.{name} is set beside data.sources; set it in those sources that it is meant for", name=name)
        for name in changed
    ]


def _validation_faults(data: DataSpec) -> list[str]:
    """Faults of the user's validation sets."""
    faults: list[str] = []
    for number, source in enumerate(data.each_validation):
        faults += _source_faults(source, f"data.validation[{number}]")
    names = [validation.name for validation in data.validation]
    faults += [
        say(
            "{count} sets of data.validation are called {name}; give each a name of its own",
            count=names.count(name),
            name=repr(name),
        )
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if HELD_OUT in names:
        faults.append(
            say(
                "a set of data.validation is called {held_out}, as is what data.validation_share holds out; name it "
                "otherwise",
                held_out=repr(HELD_OUT),
            )
        )
    return faults


def _source_faults(data: DataSpec, name: str) -> list[str]:
    faults: list[str] = []
    if data.end_of_document >= 0 and not data.separate_documents:
        faults.append(
            say(
                "{name}.end_of_document {end_of_document} says where documents end, and data.separate_documents is "
                "false, so nobody asks; set data.separate_documents to true, or leave {name}.end_of_document out",
                name=name,
                end_of_document=data.end_of_document,
            )
        )
    if data.chats and not data.separate_documents:
        faults.append(
            say(
                "{name}.chats is true, and chats that share a sequence must not see each other; set "
                "data.separate_documents to true",
                name=name,
            )
        )
    if data.chats and data.format in _WITHOUT_ROWS:
        faults.append(
            say(
                '{name}.chats is true, and files of {name}.format = "{format}" have no rows of messages; use '
                "JSONL, parquet or Arrow files",
                name=name,
                format=data.format,
            )
        )
    return faults
