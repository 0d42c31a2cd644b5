"""Plain data as YAML: maps and lists are blocks, and every other value is JSON, which YAML reads alike."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def yaml_text(value: Mapping[str, Any]) -> str:
    """The text of one document. Texts of several lines are blocks; keys are plain words."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield f"{indent}{key}:"
            yield from _lines(inner, f"{indent}  ")
        elif _is_list(inner) and inner and any(isinstance(entry, Mapping) for entry in inner):
            yield f"{indent}{key}:"
            for entry in inner:
                first, *following = _lines(entry, "")
                yield f"{indent}- {first}"
                yield from (f"{indent}  {line}" for line in following)
        elif isinstance(inner, str) and "\n" in inner:
            yield from _block(key, inner, indent)
        else:
            yield f"{indent}{key}: {_scalar(inner)}"


def _block(key: str, text: str, indent: str) -> Iterator[str]:
    """A text of several lines as a block; as JSON if reading the block would not give the same text."""
    plain = text.endswith("\n") and not text.endswith("\n\n") and not text[0].isspace()
    if not plain or not all(c.isprintable() or c == "\n" for c in text):
        yield f"{indent}{key}: {_scalar(text)}"
        return
    yield f"{indent}{key}: |"
    yield from (f"{indent}  {line}" if line else "" for line in text.splitlines())


def _scalar(value: object) -> str:
    """One value as JSON, with YAML's escapes for characters that are not printable. YAML 1.1, which PyYAML reads, takes
    1e-05 for a text and 1.0e-05 for a number."""
    if isinstance(value, float) and re.fullmatch(r"-?[0-9]+e[-+][0-9]+", text := repr(value)):
        return text.replace("e", ".0e")
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
