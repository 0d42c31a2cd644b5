"""What makes a job another one, as options that can be pasted behind a command."""

import json
import shlex

from shardwright.config.job import JobSpec


def set_line(before: JobSpec, after: JobSpec) -> str:
    """ "--set plan.tp=4 --set plan.dp=2": the fields of the plan and its precision that differ."""
    words = []
    for section in ("plan", "precision"):
        old, new = getattr(before, section), getattr(after, section)
        for name in type(old).model_fields:
            value = getattr(new, name)
            if value != getattr(old, name) and name != "fallback":  # which is no part of what runs
                text = value if isinstance(value, str) else json.dumps(value)
                words.append(f"--set {shlex.quote(f'{section}.{name}={text}')}")
    return " ".join(words)
