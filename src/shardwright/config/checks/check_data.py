"""Check that the fields of the data section agree. Facts of the files are checked where files are read."""

from shardwright.config.data import HELD_OUT, DataSpec, ReadSpec

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
            f"data.chat_template {data.chat_template!r} is what chats are written with, and there are none; set "
            "data.chats to true, or leave data.chat_template out"
        )
    if data.begin_token == "always" and data.tokenizer == "bytes":
        faults.append(
            'data.begin_token is "always", and bytes have no token that begins a text: all 256 ids are bytes; name a '
            "tokenizer in data.tokenizer, or leave data.begin_token out"
        )
    if data.today and not data.has_chats:
        faults.append(
            f"data.today {data.today!r} is what templates of chats are told, and there are none; set data.chats to "
            "true, or leave data.today out"
        )
    if not data.answers_only and not data.has_chats:
        faults.append(
            "data.answers_only is false, and only of chats does the loss leave something out; set data.chats to true, "
            "or leave data.answers_only out"
        )
    return faults


def _mixture_faults(data: DataSpec) -> list[str]:
    """Faults of fields that belong to a single source, in a section with several sources."""
    if not data.sources:
        return []
    changed = [name for name in ReadSpec.model_fields if getattr(data, name) != DataSpec.model_fields[name].default]
    return [f"data.{name} is set beside data.sources; set it in those sources that it is meant for" for name in changed]


def _validation_faults(data: DataSpec) -> list[str]:
    """Faults of the user's validation sets."""
    faults = []
    for number, source in enumerate(data.each_validation):
        faults += _source_faults(source, f"data.validation[{number}]")
    names = [validation.name for validation in data.validation]
    faults += [
        f"{names.count(name)} sets of data.validation are called {name!r}; give each a name of its own"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if HELD_OUT in names:
        faults.append(
            f"a set of data.validation is called {HELD_OUT!r}, as is what data.validation_share holds out; name it "
            "otherwise"
        )
    return faults


def _source_faults(data: DataSpec, name: str) -> list[str]:
    faults = []
    if data.end_of_document >= 0 and not data.separate_documents:
        faults.append(
            f"{name}.end_of_document {data.end_of_document} says where documents end, and data.separate_documents is "
            f"false, so nobody asks; set data.separate_documents to true, or leave {name}.end_of_document out"
        )
    if data.chats and not data.separate_documents:
        faults.append(
            f"{name}.chats is true, and chats that share a sequence must not see each other; set "
            "data.separate_documents to true"
        )
    if data.chats and data.format in _WITHOUT_ROWS:
        faults.append(
            f'{name}.chats is true, and files of {name}.format = "{data.format}" have no rows of messages; use JSONL, '
            "parquet or Arrow files"
        )
    return faults
