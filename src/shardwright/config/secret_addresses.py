"""Addresses with a password in them, which no field may have: fields are shown, and kept beside what a job makes.

A checkpoint's manifest has the whole job, and so has what starts it on a cluster: a script, a ConfigMap, a log.
"""

from typing import Any

from shardwright.config.base import hidden

WAY_OUT = (
    "write it without, and let the storage read variables of the environment (such as AWS_SECRET_ACCESS_KEY), a key of "
    "ssh, or fsspec's own configuration (~/.config/fsspec)"
)


def has_password(address: str) -> bool:
    """True if a text is an address with a password or another secret in it."""
    return "://" in address and hidden(address) != address


def password_faults(fields: dict[str, Any]) -> list[str]:
    """A sentence for each field, nested as in a file, whose text is such an address. It shows none."""
    faults: list[str] = []
    left: list[tuple[str, Any]] = [("", fields)]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{where}.{key}" if where else str(key), one) for key, one in reversed(value.items())]
        elif isinstance(value, list):
            left += [(f"{where}[{number}]", one) for number, one in reversed(list(enumerate(value)))]
        elif isinstance(value, str) and has_password(value):
            faults.append(
                f"{where} {hidden(value)} has a password, which would be kept with all that the job makes; {WAY_OUT}"
            )
    return faults
