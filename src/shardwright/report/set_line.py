"""The options that turn a job into another one, to be pasted behind a command."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from shardwright.config.job import JobSpec


def set_line(before: JobSpec, after: JobSpec) -> str:
    """ "--set plan.tp=4 --set plan.dp=2": the fields of the plan and its precision that differ."""
    fields = {}
    for section in ("plan", "precision"):
        old, new = getattr(before, section), getattr(after, section)
        for name in type(old).model_fields:
            value = getattr(new, name)
            if value != getattr(old, name) and name != "fallback":  # which is no part of what runs
                fields[f"{section}.{name}"] = value
    return set_words(fields)


def set_words(fields: Mapping[str, Any]) -> str:
    """Fields by their whole names as options."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return " ".join(f"--set {shlex.quote(f'{name}={text}')}" for name, text in texts.items())
