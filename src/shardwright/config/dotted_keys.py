"""Fields within fields, and the same as one dictionary whose names have points between: plan.tp."""

from typing import Any


def flat_keys(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested keys with points between: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            flat |= flat_keys(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def nested_keys(flat: dict[str, Any]) -> dict[str, Any]:
    """Keys with points between as nested ones."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return nested
