"""Files of a released model's folder that programs need besides the weights: tokenizer, generation configuration, chat
template."""

import os
from collections.abc import Sequence
from pathlib import Path

from shardwright.config.base import PlanError, error_text
from shardwright.config.data import DataSpec
from shardwright.config.hugging_face.config_json import CONFIG
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_file
from shardwright.train.data.template_files import template_path

_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt",
)  # fmt: skip
_MOST_BYTES = 256 * MIB  # of one file


def _target_outside(file: Path) -> str:
    """The target of a file that is a link out of its folder; else "". In the Hub's cache all files of a model are links
    to ../../blobs/HASH below models--NAME; such a link counts as inside."""
    target, folder = Path(os.path.realpath(file)), Path(os.path.realpath(file.parent))
    is_in_cache = target.parent.name == "blobs" and (
        target.parent.parent.name.startswith("models--") or target.parent == folder.parent.parent / "blobs"
    )
    return "" if is_in_cache or target.is_relative_to(folder) else str(target)


def companions(folder: Path, names: Sequence[str] = COMPANIONS) -> dict[str, bytes]:
    """The contents of a folder's COMPANIONS, by name. Raises PlanError with each file that can't be read, or if one of
    them or config.json is a link out of the folder."""
    contents, faults = dict[str, bytes](), list[str]()
    for name in (CONFIG, *names):
        if (folder / name).is_file():
            if target := _target_outside(folder / name):
                faults.append(
                    say(
                        "{name} is a link out of the folder, to {target}, and what is there would be put beside the "
                        "weights; put a copy in its place, or remove it",
                        name=name,
                        target=target,
                    )
                )
                continue
            if name == CONFIG:  # callers write a new one
                continue
            try:
                contents[name] = read_file(folder / name, _MOST_BYTES)
            except FileFault as error:
                faults.append(error_text(error))
    if faults:
        raise PlanError(say("model {name}", name=str(folder)), faults)
    return contents


def text_companions(data: DataSpec) -> dict[str, bytes]:
    """The tokenizer and the chat template that a run's data were written with, by the names that programs look for.

    Files that are no longer there are left out: weights can be used without. Raises PlanError as `companions` does.
    """
    contents: dict[str, bytes] = {}
    tokenizer, template = Path(os.path.expanduser(data.tokenizer)), template_path(data.chat_template)
    if data.tokenizer == "bytes":
        tokenizer = Path()
    else:
        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        contents = companions(folder, [name for name in COMPANIONS if name != "generation_config.json"])
    try:
        if tokenizer.is_file():
            contents[_TOKENIZER] = read_file(tokenizer, _MOST_BYTES)
        if data.chat_template and template.is_file():
            contents[_TEMPLATE] = read_file(template, _MOST_BYTES)
    except FileFault as error:
        raise PlanError("data", [str(error)]) from None
    return contents
