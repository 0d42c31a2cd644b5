"""JSON schemas of answers, from samples of them: types, names that are always there, and units by the ends of names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Units by names, the first that fits.
_UNITS = (
    (r"bytes_per_s$", "bytes a second"),
    (r"tokens_per_s", "tokens a second"),
    (r"gb_per_s$", "GB a second, 1e9 bytes"),
    (r"(?<!per)_s$|^seconds$", "seconds"),
    (r"_days$|^days$", "days"),
    (r"_bytes$|^bytes$", "bytes"),
    (r"_gib$", "GiB, 2**30 bytes"),
    (r"usd", "US dollars"),
    (r"kwh", "kWh"),
    (r"share$|^mfu$|^hfu$|efficiency$", "a share, from 0 to 1"),
    (r"loss$", "nats a token"),
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")  # of a field; others are keys of a map, such as axes, devices or paths
_NAMES_OF_JSON = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def answer_schema(title: str, description: str, samples: Sequence[Any]) -> dict[str, Any]:
    """The schema of a command's answer, of which there are some samples."""
    return {"$schema": DIALECT, "title": title, "description": description} | _schema(samples)


def _schema(samples: Sequence[Any], name: str = "") -> dict[str, Any]:
    """The schema of a value that the samples are of; `name` is its field's."""
    kinds = _kinds(samples)
    schema: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds} if kinds else {}
    if unit := _unit(name, kinds):
        schema["description"] = unit
    mappings = [sample for sample in samples if isinstance(sample, dict)]
    if mappings and name == "job":
        schema["description"] = "fields of a job, as its TOML file has them"
    elif mappings:
        schema |= _object(mappings, name)
    if items := [item for sample in samples if isinstance(sample, list) for item in sample]:
        schema["items"] = _schema(items, name)
    return schema


def _kinds(samples: Iterable[Any]) -> list[str]:
    """JSON's names of the types of samples; whole numbers are numbers where others are."""
    kinds = {"null" if sample is None else _NAMES_OF_JSON[type(sample)] for sample in samples}
    return sorted(kinds - {"integer"} if "number" in kinds else kinds)


def _object(samples: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for sample in samples for key in sample))
    by_key = {key: [sample[key] for sample in samples if key in sample] for key in keys}
    if keys and not all(map(_NAME.fullmatch, keys)):
        return {"additionalProperties": _schema([value for values in by_key.values() for value in values], name)}
    required = [key for key in keys if len(by_key[key]) == len(samples)]
    properties = {key: _schema(values, key) for key, values in by_key.items()}
    return {"properties": properties} | ({"required": required} if required else {})


def _unit(name: str, kinds: Sequence[str]) -> str:
    if not {"number", "integer"}.intersection(kinds):
        return ""
    return next((unit for pattern, unit in _UNITS if re.search(pattern, name)), "")
