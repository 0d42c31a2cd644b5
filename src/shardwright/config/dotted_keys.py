"""Fields within fields, and the same as one dictionary whose names have points between: plan.tp."""

from typing import Any


def flat_keys(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested keys with points between: {"a": {"b": 1}} is {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            found |= flat_keys(value, f"{name}.")
        else:
            found[name] = value
    return found


def nested_keys(flat: dict[str, Any]) -> dict[str, Any]:
    """Keys with points between as nested ones."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        target = found
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return found
