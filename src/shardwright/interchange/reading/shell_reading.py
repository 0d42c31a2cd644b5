"""The variables that commands such as `read` and `mapfile` set from a text that the script itself has: a here-document
or a here-string (Bash manual, section 4.2)."""

import re
from collections.abc import Sequence

from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names
from shardwright.interchange.reading.shell_skipped import is_name

_BLANKS = " \t\n"
_MOST_LINES = 10_000
Read = dict[str, str | list[str] | None]  # the values by name; None is an unknown one


def parts_of(text: str, separators: str | None) -> list[str]:
    """A text split at separators, those of $IFS: blanks if it is None or unknown; not at all if it is empty."""
    if separators is None or UNKNOWN.search(separators) or set(separators) == set(_BLANKS):
        return text.split()
    if not separators:
        return [text] if text else []
    chars = "".join(dict.fromkeys(separators))
    return [part for part in re.split(f"[{re.escape(chars)}]+", text) if part]


def values_read(words: Sequence[str], text: str, separators: str | None) -> Read:
    """The variables that a command sets from a text. They are unknown if options of the command are not
    followed. `separators` are as in `parts_of`."""
    options = [word for word in words[1:] if word.startswith("-")]
    names = [word for word in words[1:] if is_name(word)]
    if words[0] in ("mapfile", "readarray"):
        names = names or ["MAPFILE"]
        is_followed = options == ["-t"] and len(names) == 1 and text.count("\n") < _MOST_LINES
        return {name: text.split("\n") if is_followed else None for name in names}
    if words[0] != "read" or "\\" in text:
        return dict.fromkeys(names)
    names = names or ["REPLY"]
    if "-d" in options and "" in words and set(options) <= {"-r", "-d", "-rd"} and len(names) == 1:
        return {names[0]: text}
    line = text.split("\n", 1)[0]
    if unknown_names(line) and len(names) > 1:
        return dict.fromkeys(names)
    if set(options) <= {"-r", "-a", "-ra", "-ar"} and any("a" in option for option in options):
        return {name: [*parts_of(line, separators)] if len(names) == 1 else None for name in names}
    if not set(options) <= {"-r"}:
        return dict.fromkeys(names)
    parts = parts_of(line, separators)
    if len(names) == 1:
        return {names[0]: line.strip(_BLANKS if separators is None else "")}
    if len(parts) > len(names):
        return dict.fromkeys(names)
    return {name: parts[place] if place < len(parts) else "" for place, name in enumerate(names)}
