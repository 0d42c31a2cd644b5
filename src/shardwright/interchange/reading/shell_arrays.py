"""The values of variables of a shell, which may be arrays, and their elements."""

from shardwright.config.fault_gathering_reader import signed
from shardwright.config.phrase import say
from shardwright.interchange.reading.shell_words import ShellFault

Value = str | list[str] | dict[str, str]  # a word, an array, an associative array

_MOST_TEXT = 1 << 20


def appended(old: Value, value: Value) -> Value:
    """A value behind another one. Keys and plain words are never in one array."""
    if isinstance(old, dict) or isinstance(value, dict):
        return old | value if isinstance(old, dict) and isinstance(value, dict) else value
    if isinstance(old, str):
        return old + value if isinstance(value, str) else [old, *value]
    return [(old or [""])[0] + value, *old[1:]] if isinstance(value, str) else old + value


def element(value: Value | None, index: str) -> Value | None:
    if value is None:
        return [] if index in ("@", "*") else None
    if isinstance(value, dict):
        return value.get(index) if index not in ("@", "*") else [*value.values()]
    values = [value] if isinstance(value, str) else value
    if index in ("@", "*"):
        return values
    position = signed(index)
    return values[position] if position is not None and -len(values) <= position < len(values) else None


def as_list(value: Value | None) -> list[str]:
    return [*value.values()] if isinstance(value, dict) else list(value) if isinstance(value, list) else [value or ""]


def check_length(length: int) -> None:
    """Raise ShellFault for a word of too many characters."""
    if length > _MOST_TEXT:
        raise ShellFault(
            say("a word of more than {most:,} characters; check that it is the launch script", most=_MOST_TEXT)
        )
