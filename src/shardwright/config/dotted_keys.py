"""Conversions between nested fields and one flat dictionary with dots in its keys: plan.tp."""

from typing import Any


def flat_keys(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested keys with dots: {"a": {"b": 1}} becomes {"a.b": 1}. `before` is a prefix of all keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            flat |= flat_keys(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def nested_keys(flat: dict[str, Any]) -> dict[str, Any]:
    """Nest keys with dots: {"a.b": 1} becomes {"a": {"b": 1}}."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return nested
