"""Addresses with a password, which no field may have, because fields are shown and stored with the results of a job.

A checkpoint's manifest has all fields of the job, and so have the files that start it on a cluster: a script, a
ConfigMap, a log.
"""

from typing import Any

from shardwright.config.base import hidden
from shardwright.config.phrase import say

WAY_OUT = say(
    "write it without, and let the storage read variables of the environment (such as AWS_SECRET_ACCESS_KEY), a key "
    "of ssh, or fsspec's own configuration (~/.config/fsspec)"
)


def has_password(address: str) -> bool:
    """True if a text is an address that contains a password or another secret."""
    return "://" in address and hidden(address) != address


def password_faults(fields: dict[str, Any]) -> list[str]:
    """A fault for each field, nested as in a file, that is an address with a password. Faults don't show passwords."""
    faults: list[str] = []
    pending: list[tuple[str, Any]] = [("", fields)]
    while pending:
        field, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{field}.{key}" if field else str(key), item) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(f"{field}[{number}]", item) for number, item in reversed(list(enumerate(value)))]
        elif isinstance(value, str) and has_password(value):
            faults.append(
                say(
                    "{field} {value} has a password, which would be kept with all that the job makes; {way_out}",
                    field=field,
                    value=hidden(value),
                    way_out=WAY_OUT,
                )
            )
    return faults
