"""Finds a run's chat template: in the file that data.chat_template names, or beside the tokenizer or the weights."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError, error_text
from shardwright.config.data import DataSpec
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text, system_reason

_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_CHATML = "chatml"  # the template that comes with Shardwright, for models that have none
_MOST_BYTES, _MOST_TEMPLATE_BYTES = 64 * MIB, MIB
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TemplateFiles:
    """A template: its text, its file, and the special tokens that it may use, by name."""

    text: str
    path: Path
    special: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """A hash that differs between templates with different results."""
        return blake2b(json.dumps([self.text, self.special]).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def find_template(data: DataSpec, weights: str = "") -> TemplateFiles | None:
    """The template for chats; None if there is none. Raises PlanError if it can't be read."""
    folders = list(folders_beside(data, weights))
    try:
        configs = [(folder, read_config(folder)) for folder in folders]
        special = next((special_tokens(config) for _, config in configs if config), {})
        if data.chat_template:
            path = template_path(data.chat_template)
            return TemplateFiles(read_text(path, _MOST_TEMPLATE_BYTES, "chat template"), path, special)
        for folder, config in configs:
            if (jinja_path := folder / _TEMPLATE).is_file():
                return TemplateFiles(read_text(jinja_path, _MOST_TEMPLATE_BYTES, "chat template"), jinja_path, special)
            if text := _template_of(config):
                return TemplateFiles(text, folder / _CONFIG, special)
    except FileFault as fault:
        raise PlanError("data", [say("data.chat_template: {fault}", fault=error_text(fault))]) from None
    except OSError as error:
        unreadable = say(
            "chat template {path} can't be read: {reason}; check the path and its permissions",
            path=error.filename or data.chat_template,
            reason=system_reason(error),
        )
        raise PlanError("data", [unreadable]) from None
    return None


def template_path(chat_template: str) -> Path:
    """The file of a data.chat_template that is not empty: that of Shardwright's own ChatML, or the one it names."""
    if chat_template == _CHATML:
        return Path(__file__).with_name("chatml.jinja")
    return Path(os.path.expanduser(chat_template))


def folders_beside(data: DataSpec, weights: str) -> Iterator[Path]:
    """The folders that may hold a template or a configuration: beside the tokenizer, and beside the weights."""
    if data.tokenizer != "bytes":
        path = Path(os.path.expanduser(data.tokenizer))
        yield path if path.is_dir() else path.parent
    if weights:
        path = Path(os.path.expanduser(weights))
        yield path if path.is_dir() else path.parent


def read_config(folder: Path, name: str = _CONFIG) -> dict[str, Any]:
    """The fields of a configuration file in a folder; empty if there is none. Raises FileFault or OSError."""
    path = folder / name
    if not path.exists():
        return {}
    try:
        fields = json.loads(read_text(path, _MOST_BYTES, name))
    except (json.JSONDecodeError, RecursionError) as error:
        way_out = say("copy it again")
        if name == _CONFIG:
            way_out = say("copy it again, or name a template in data.chat_template")
        raise FileFault(
            say("{path} is not JSON: {reason}; {way_out}", path=path, reason=error_text(error), way_out=way_out)
        ) from None
    return fields if isinstance(fields, dict) else {}


def special_tokens_of(folder: Path) -> dict[str, str]:
    """The texts of the special tokens of the tokenizer in a folder, by role. Raises FileFault, OSError."""
    return special_tokens(read_config(folder))


def _template_of(config: dict[str, Any]) -> str:
    """The template in a tokenizer's configuration; of several, the one called "default"; "" if there is none."""
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else ""


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens that a tokenizer's configuration names, by role such as "bos_token"."""
    texts = {}
    for name in _TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts
