"""Configurations as plain data: untrusted YAML, TOML and JSON, read with limits; and references of Hydra's in them."""

import json
import re
from typing import Any

from shardwright.config.base import error_text, shortened
from shardwright.config.fault_gathering_reader import signed
from shardwright.config.phrase import Phrase, say
from shardwright.config.toml_file import TOML_ERRORS, parse_toml, value_faults
from shardwright.config.units import KIB
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark
from shardwright.interchange.reading.shell_words import ShellFault

_TEMPLATE = re.compile(r"\{\{-?\s*(?:\.\w|\$\w|range\b|if\b|include\b|with\b|toYaml\b|end\b|define\b)|\{%-?\s*\w")
_KEYS = re.compile(r"[\"']([A-Za-z_][\w.-]{0,80})[\"']\s*:")
_MOST_YAML = 256 * KIB
_BARE_MARK = re.compile(rf"([:,\[]\s*)((?:{UNKNOWN.pattern})+)(?=\s*[,}}\]])".replace("([^", "(?:[^"))


def read_data(name: str, text: str) -> dict[str, Any]:
    """The data of a configuration; the suffix of its name gives the format. Raises ShellFault."""
    kind = name.rpartition(".")[2].lower()
    try:
        data = parse_toml(text) if kind == "toml" else _json(text) if kind == "json" else _yaml(text)
    except ShellFault:
        raise
    except TOML_ERRORS as error:
        reason = error_text(error)
        first = reason if isinstance(reason, Phrase) else shortened((reason.splitlines() or [""])[0], 200)
        raise ShellFault(
            say("{name} is not valid {kind}: {reason}; mend it", name=name, kind=kind.upper(), reason=first)
        ) from None
    if not isinstance(data, dict):
        raise ShellFault(
            say("{name} has no keys with values, as a configuration has; check that it is the file", name=name)
        )
    if faults := value_faults(data):
        raise ShellFault(say("{subject}: {fault}", subject=name, fault=faults[0]))
    return data


def object_of(value: Any) -> dict[str, Any]:
    """The keys and values of an object, which a setting may have as a text in JSON; empty if it has none that can be
    read."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return {}
    try:
        data = _json(value)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def keys_of(value: str) -> list[str]:
    """The keys of an object in a text that is no JSON, in Python's quotes or with variables of a shell within."""
    return _KEYS.findall(value) if value.lstrip().startswith("{") else []


def read_documents(name: str, text: str) -> list[dict[str, Any]]:
    """The mappings among the documents of a YAML, which --- parts. Raises ShellFault."""
    documents = _yaml(text, several=True)
    if any(value_faults(data) for data in documents if isinstance(data, dict)):
        raise ShellFault(say("{name} has values that no configuration has; check that it is the file", name=name))
    return [{str(key): value for key, value in data.items()} for data in documents if isinstance(data, dict)]


def _json(text: str) -> Any:
    """The data of JSON; the mark of an unknown value, which a script writes without quotes, is a text."""
    return json.loads(_BARE_MARK.sub(r'\1"\2"', text))


def _yaml(text: str, *, several: bool = False) -> Any:
    if len(text) > _MOST_YAML:
        raise ShellFault(
            say(
                "YAML of {count:,} characters, and at most {most:,} are read here; check the file",
                count=len(text),
                most=_MOST_YAML,
            )
        )
    try:
        import yaml

        from shardwright.interchange.reading.yaml_loader import load_documents, load_yaml
    except ImportError:
        raise ShellFault(say("reading YAML takes PyYAML: pip install 'shardwright[yaml]'")) from None
    try:
        return load_documents(text) if several else load_yaml(text)
    # A value that does not fit its tag (!!bool x) raises whatever PyYAML runs into.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ShellFault(_template_fault(text) or _yaml_fault(error)) from None


def _template_fault(text: str) -> str:
    """The fault of a template, which is no YAML before it is filled in; empty for another text."""
    mark = _TEMPLATE.search(text)
    if mark is None:
        return ""
    return say(
        "line {line}: it is a template of Helm or Jinja, whose values are elsewhere; name the file that it becomes, "
        "such as that of helm template CHART > job.yaml",
        line=text.count("\n", 0, mark.start()) + 1,
    )


def _yaml_fault(error: Exception) -> str:
    """The fault of a text that is not valid YAML, with its line if that is known."""
    problem = shortened(getattr(error, "problem", None) or "", 200)
    problem = problem or say("a value can't be read as its type ({kind})", kind=type(error).__name__)
    if (position := getattr(error, "problem_mark", None)) is not None:
        problem = say("line {line}: {problem}", line=position.line + 1, problem=problem)
    return say("it is not valid YAML: {problem}; mend it", problem=problem)


# Groups of NeMo's launcher, in whose files a reference names the group before the key.
STAGES_OF_LAUNCHER = ("training.", "peft.", "fine_tuning.", "adapter_learning.", "prompt_learning.")


def resolved(flat: dict[str, Any]) -> dict[str, Any]:
    """Values with Hydra's references (${.name}, ${multiply:4, ${.name}}) resolved; an unknown one becomes a mark."""
    return {name: _resolve(value, name, flat, 0) for name, value in flat.items()}


def _resolve(value: Any, name: str, flat: dict[str, Any], depth: int) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > 8 or len(value) > 1000:
        return mark(name)
    text = value.strip()
    if not (text.startswith("${") and _closing(text, 2) == len(text) - 1):
        return value  # text around a reference: a path
    inner = text[2:-1]
    function, colon, arguments = inner.partition(":")
    if not colon:
        return _referred(inner.strip(), name, flat, depth)
    parts = _split(arguments)
    if len(parts) != 2:  # checked before they are resolved: references to references would multiply
        return mark(name)
    left, right = (_number(_resolve(part.strip(), name, flat, depth + 1)) for part in parts)
    if left is None or right is None:
        return mark(name)
    known = {"multiply": left * right, "sum": left + right}
    if right and function in ("divide", "divide_floor", "divide_ceil"):
        known |= {"divide": left / right, "divide_floor": left // right, "divide_ceil": -(-left // right)}
    return known.get(function, mark(name))


def _referred(path: str, name: str, flat: dict[str, Any], depth: int) -> Any:
    num_points = len(path) - len(path.lstrip("."))
    sections = name.split(".")[: -num_points or None] if num_points else []
    full = ".".join([*sections, path.lstrip(".")])
    for key in (full, *(full.removeprefix(stage) for stage in STAGES_OF_LAUNCHER)):
        if key in flat and key != name:
            return _resolve(flat[key], key, flat, depth + 1)
    return mark(full)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return signed(str(value))


def _closing(text: str, place: int) -> int:
    depth = 1
    while place < len(text):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
        place += 1
    return -1


def _split(text: str) -> list[str]:
    """Arguments of a function, split at the commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
