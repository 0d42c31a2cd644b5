"""Files of a released model's folder that programs want beside its weights: tokenizer, generation configuration, chat
template."""

import os
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import CONFIG
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_file

COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt",
)  # fmt: skip
_MOST_BYTES = 256 * MIB  # of one of them


def _target_outside(file: Path) -> str:
    """Where a file lies that is a link to another folder; nothing for one of the Hub's cache (../../blobs/HASH below
    models--NAME), where all files of a model are links."""
    target, folder = Path(os.path.realpath(file)), Path(os.path.realpath(file.parent))
    cache = target.parent.name == "blobs" and (
        target.parent.parent.name.startswith("models--") or target.parent == folder.parent.parent / "blobs"
    )
    return "" if cache or target.is_relative_to(folder) else str(target)


def companions(folder: Path) -> dict[str, bytes]:
    """The contents of those files that a folder has, by name. Raises PlanError with each that can't be read, and where
    one of them or config.json is a link out of it."""
    found, faults = dict[str, bytes](), list[str]()
    for name in (CONFIG, *COMPANIONS):
        if (folder / name).is_file():
            if target := _target_outside(folder / name):
                faults.append(
                    f"{name} is a link out of the folder, to {target}, and what is there would be put beside the "
                    "weights; put a copy in its place, or remove it"
                )
                continue
            if name == CONFIG:  # its keys are written anew
                continue
            try:
                found[name] = read_file(folder / name, _MOST_BYTES)
            except FileFault as error:
                faults.append(str(error))
    if faults:
        raise PlanError(f"model {folder}", faults)
    return found
