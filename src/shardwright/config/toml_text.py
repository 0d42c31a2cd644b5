"""Write fields as the text of a TOML file, which config/toml_file.py reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.config.plain_values import plain

JOB_BEGINNING = "# A job that shardwright wrote"
_LINE = 120


def toml_text(fields: Mapping[str, Any]) -> str:
    """The text of a file: plain values first, then each section, and each entry of lists of sections."""
    values = {key: value for key, value in fields.items() if not _is_section(value) and not _are_sections(value)}
    lines = [f"{key} = {value_text(value)}" for key, value in values.items()]
    for key, value in fields.items():
        if _is_section(value):
            lines += ["", f"[{key}]", *(f"{name} = {value_text(inner)}" for name, inner in value.items())]
        elif _are_sections(value):
            for section in value:
                lines += ["", f"[[{key}]]", *(f"{name} = {value_text(inner)}" for name, inner in section.items())]
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """The text of one value. Numbers, booleans and strings are as in JSON, except that TOML wants DEL escaped; tables
    within lists are inline; any other value is written as its text."""
    value = plain(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {value_text(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return _list_text([value_text(inner) for inner in value])
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _list_text(values: Sequence[str]) -> str:
    text = f"[{', '.join(values)}]"
    if len(text) < _LINE:
        return text
    lines: list[str] = []
    line = ""
    for value in values:
        if len(line) + len(value) > _LINE - 8:
            lines, line = [*lines, line], ""
        line += f"{' ' if line else ''}{value},"
    return "[\n" + "\n".join(f"    {line}" for line in [*lines, line]) + "\n]"


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 3


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)
