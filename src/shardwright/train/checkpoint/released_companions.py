"""Files of a released model's folder that programs want beside its weights: tokenizer, generation configuration, chat
template."""

from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_file

COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt",
)  # fmt: skip
_MOST_BYTES = 256 * MIB  # of one of them


def companions(folder: Path) -> dict[str, bytes]:
    """The contents of those files that a folder has, by name. Raises PlanError with each that can't be read."""
    found, faults = dict[str, bytes](), list[str]()
    for name in COMPANIONS:
        if (folder / name).is_file():
            try:
                found[name] = read_file(folder / name, _MOST_BYTES)
            except FileFault as error:
                faults.append(str(error))
    if faults:
        raise PlanError(f"model {folder}", faults)
    return found
