"""A command line of flags as settings, and back."""

import shlex
from typing import Any


def settings_of(words: list[str]) -> dict[str, Any]:
    """The flags of a command with their values: a word, a list of words, or True if none. The last of a name counts."""
    settings: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            # A quoted element of an array is one word: "--fp8-format hybrid".
            name, blank, attached = name.partition(" ")
            name = name if name == "DDP-impl" else name.replace("_", "-")
            settings[name] = ([value] if equals else []) + (attached.split() if blank else [])
        elif name:
            settings[name].append(word)
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in settings.items()}


def flag_words(settings: dict[str, Any]) -> list[str]:
    """The lines of a command, one for each flag with its values."""
    lines = []
    for name, value in settings.items():
        if value is True:
            lines.append(f"--{name}")
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            lines.append(" ".join([f"--{name}", *(shlex.quote(value_word(item)) for item in values)]))
    return lines


def value_word(value: Any) -> str:
    """The text of a value as an argument."""
    return repr(value) if isinstance(value, float) else str(value)
