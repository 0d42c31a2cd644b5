"""Expansions that change the text of a variable: ${NAME%PATTERN}, ${NAME//OLD/NEW}, ${NAME:FROM:LENGTH}, ${NAME^^}.

Patterns are those of file names (Bash manual, section 3.5.3).
"""

import re
from collections.abc import Callable
from fnmatch import translate

from shardwright.config.fault_gathering_reader import signed
from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names

_MOST_TEXT = 4096  # characters of a text that patterns are tried on
_MOST_PATTERN = 200
# Parts of patterns that are not followed: lists of patterns, which an option of the shell tells from their signs,
# classes of characters, and escaped characters.
_UNFOLLOWED = re.compile(r"[?*+@!]\(|\[[:.=]|\\")


def split_index(text: str) -> tuple[str, str]:
    """The index of an element and what follows, of a text that begins with a bracket: [INDEX]REST. An index may have
    brackets of its own, as ${#NAME[*]} has."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth == 0:
            return text[1:place], text[place + 1 :]
    return text[1:], ""


def changed_text(text: str, modifier: str, expanded: Callable[[str], str]) -> str | None:
    """The text of a variable after a modifier, such as "%.sh"; None if it is unknown. `expanded` expands the words of a
    modifier."""
    if len(text) > _MOST_TEXT:
        return None
    if unknown_names(text):
        return _without_known_beginning(text, modifier, expanded)
    if modifier in ("^^", ",,"):
        return text.upper() if modifier == "^^" else text.lower()
    if modifier in ("^", ","):
        return (text[:1].upper() if modifier == "^" else text[:1].lower()) + text[1:]
    if modifier.startswith(("#", "%")):
        return _without(text, modifier, expanded)
    if modifier.startswith("/"):
        return _replaced(text, modifier[1:], expanded)
    return _part(text, modifier[1:], expanded) if modifier.startswith(":") else None


def _without(text: str, modifier: str, expanded: Callable[[str], str]) -> str | None:
    """The text without its beginning (#) or its end (%) that fits a pattern; doubled signs take the longest one."""
    sign = modifier[0]
    is_longest = modifier.startswith(2 * sign)
    searched = _expanded_pattern(modifier[1 + is_longest :], expanded)
    pattern = None if searched is None else compiled_pattern(searched)
    if pattern is None:
        return None
    length = _fitting_length(text, sign, pattern, is_longest=is_longest) or 0
    return text[length:] if sign == "#" else text[: len(text) - length]


def _fitting_length(text: str, sign: str, pattern: re.Pattern[str], *, is_longest: bool) -> int | None:
    """Characters of the longest or shortest beginning (#) or end (%) that fits a pattern; None if none fits."""
    lengths = range(len(text), -1, -1) if is_longest else range(len(text) + 1)
    for length in lengths:
        if pattern.fullmatch(text[:length] if sign == "#" else text[len(text) - length :]):
            return length
    return None


def _without_known_beginning(text: str, modifier: str, expanded: Callable[[str], str]) -> str | None:
    """The text without its beginning that fits a pattern, if its shortest one ends before what is unknown."""
    known = UNKNOWN.split(text)[0]
    if modifier[:1] != "#" or modifier[:2] == "##":
        return None
    rest = _without(known, modifier, expanded)
    return None if rest is None or rest == known else rest + text[len(known) :]


def _replaced(text: str, modifier: str, expanded: Callable[[str], str]) -> str | None:
    """The text with the first part, or with // all parts, that fit a pattern replaced: at the beginning alone where a
    single one begins with #, and at the end with %. Versions of bash differ in what & of the new text stands for."""
    is_all = modifier.startswith("/")
    old, _, new = (part.replace("\0", "/") for part in modifier[is_all:].replace("\\/", "\0").partition("/"))
    sign = old[:1] if old[:1] in ("#", "%") else ""
    rest, replacement = _expanded_pattern(old.removeprefix(sign), expanded), expanded(new) if new else ""
    if rest is None or not old or rest[:1] in ("#", "%") or unknown_names(replacement) or "&" in new + replacement:
        return None
    pattern = compiled_pattern(sign + rest if is_all else rest)
    if pattern is None:
        return None
    if sign and not is_all:
        length = _fitting_length(text, sign, pattern, is_longest=True)
        if length is None:
            return text
        return replacement + text[length:] if sign == "#" else text[: len(text) - length] + replacement
    place, pieces = 0, list[str]()
    while place < len(text):
        end = next((end for end in range(len(text), place, -1) if pattern.fullmatch(text, place, end)), None)
        if end is None:
            pieces.append(text[place])
            place += 1
            continue
        pieces.append(replacement)
        place = end
        if not is_all:
            break
    return "".join(pieces) + text[place:]


def changed_items(items: list[str], modifier: str, expanded: Callable[[str], str]) -> list[str] | None:
    """The elements of an array from a place on, so many as the modifier :FROM:LENGTH says; None if it is unknown."""
    begin, _, length = (word.strip() for word in modifier[1:].partition(":"))
    first, size = signed(expanded(begin)), signed(expanded(length)) if length else len(items)
    if first is None or size is None or size < 0 or -first > len(items):
        return None
    return items[first:][:size]


def _part(text: str, modifier: str, expanded: Callable[[str], str]) -> str | None:
    """The part of a text from a place on, of a length."""
    begin, _, length = (word.strip() for word in modifier.partition(":"))
    first, size = signed(expanded(begin)), signed(expanded(length)) if length else len(text)
    if first is None or size is None or abs(first) > len(text):
        return None
    rest = text[first:]
    return rest[:size]


def _expanded_pattern(text: str, expanded: Callable[[str], str]) -> str | None:
    """The expanded text of a pattern; None if it has parts that are not followed, which `expanded` takes for words."""
    return None if _UNFOLLOWED.search(text) else expanded(text)


def compiled_pattern(pattern: str) -> re.Pattern[str] | None:
    """A pattern of file names; None if it is unknown, long, or not followed."""
    if unknown_names(pattern) or len(pattern) > _MOST_PATTERN or pattern.count("*") > 4:
        return None
    return None if _UNFOLLOWED.search(pattern) else re.compile(translate(pattern.replace("[^", "[!")))
