"""The options that turn a job into another one, to paste behind a command."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from shardwright.config.job import JobSpec


def set_line(old_job: JobSpec, new_job: JobSpec) -> str:
    """The fields of plan and precision that differ, as options: "--set plan.tp=4 --set plan.dp=2"."""
    fields = {}
    for section in ("plan", "precision"):
        old, new = getattr(old_job, section), getattr(new_job, section)
        for name in type(old).model_fields:
            value = getattr(new, name)
            if value != getattr(old, name) and name != "fallback":  # fallbacks are no part of the plan that runs
                fields[f"{section}.{name}"] = value
    return set_words(fields)


def set_words(fields: Mapping[str, Any]) -> str:
    """Fields, by their full names, as options."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return " ".join(f"--set {shlex.quote(f'{name}={text}')}" for name, text in texts.items())
