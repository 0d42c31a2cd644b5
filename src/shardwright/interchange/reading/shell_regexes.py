"""Regular expressions of sed, grep and [[ =~ ]] as Python's, where both mean the same (POSIX, chapter 9).

POSIX takes the longest match and Python the first alternative, so that an expression with | is followed only where it
is asked whether there is a match at all.
"""

import re

REGEX = "=~"  # the word of a condition [[ TEXT =~ EXPRESSION ]]
MATCHED = "BASH_REMATCH"  # the array of what the expression and its groups fit
_MOST_PATTERN, _MOST_REPEATED, _MOST_LINE, _MOST_SEARCHED = 200, 3, 1000, 300
_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": " \\t\\n\\r\\f\\v",
    "blank": " \\t",
    "xdigit": "0-9A-Fa-f",
}
# A list in brackets, a repetition, an escape, or one sign.
_PART = re.compile(r"\[\^?\]?(?:\[:\w+:\]|[^\]\[\\])*\]|\\\{\d+,?\d*\\\}|\{\d+,?\d*\}|\\.|.", re.DOTALL)
_REPETITION = re.compile(r"\\?\{(\d+)(,?)(\d*)\\?\}")
_KINDS = {"w": r"\w", "W": r"\W", "s": r"\s", "S": r"\S", "b": r"\b", "n": r"\n", "t": r"\t"}  # of GNU
_REPEATING = ("*", "+", "?")


def python_regex(pattern: str, *, kind: str, finds: bool = False, ignores_case: bool = False) -> re.Pattern[str] | None:
    """A regular expression in Python's words; None if it is not followed. `kind` is "basic", "extended" or "perl".
    `finds` is True if the text that fits is used, not only that there is some."""
    if not pattern.isascii() or len(pattern) > _MOST_PATTERN:
        return None
    parts: list[str] = []
    groups: list[int] = []  # where each open group begins
    repeated, is_after_group = set[int](), False  # parts that are repeated
    is_whole = pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith(r"\$")  # fits all or nothing
    for part in _PART.findall(pattern):
        sign = _sign(part, kind)
        if sign is None or (sign == "|" and finds):
            return None
        is_repeating = sign in _REPEATING or (len(sign) > 1 and sign[0] == "{")
        if is_repeating and (not parts or parts[-1] in ("(", "|", "^")):
            if kind != "basic" or sign != "*":
                return None
            sign, is_repeating = r"\*", False  # a star at the beginning of a basic one is itself
        is_optional = sign == "?" and is_whole
        if is_repeating and (len(parts) - 1 in repeated or (is_after_group and repeated and not is_optional)):
            return None  # repeated twice, or a repetition of a group in which something is repeated
        repeated |= {len(parts), len(parts) - 1} if is_repeating else set()
        if sign == "(":
            groups.append(len(parts))
        if sign == ")" and not groups:
            return None
        is_after_group = sign == ")"
        if is_after_group:
            groups.pop()
        parts.append(sign)
    num_open = sum(part in ("*", "+") or part.endswith(",}") for part in parts)
    if groups or num_open > _MOST_REPEATED:
        return None
    try:
        return re.compile("".join(parts), re.ASCII | (re.IGNORECASE if ignores_case else 0))
    except re.error:
        return None


def _sign(part: str, kind: str) -> str | None:
    """A part of an expression in Python's words; None if it is not followed."""
    if part.startswith("[") and len(part) > 1:
        return _bracket(part)
    if part == "[":
        return None
    is_escaped, char = part[0] == "\\" and len(part) > 1, part[-1]
    if match := _REPETITION.fullmatch(part):
        if is_escaped == (kind == "basic"):
            return f"{{{match[1]}{match[2]}{match[3]}}}" if int(match[1]) < 100 > int(match[3] or 0) else None
        return re.escape(part) if not is_escaped else None
    if is_escaped and kind == "basic" and char in "()+?|":
        return char
    if is_escaped:
        if kind == "perl" and char == "d":
            return "[0-9]"
        return _KINDS.get(char) if char.isalnum() else re.escape(char)
    if kind == "basic":
        return char if char in ".*" else _anchored(char)
    return char if char in ".*+?()|" else _anchored(char)


def _anchored(char: str) -> str | None:
    """A sign that stands for itself, or for an end of the line."""
    if char in "{}\\":
        return re.escape(char) if char != "\\" else None
    return {"^": "^", "$": "$"}.get(char, re.escape(char))


def _bracket(part: str) -> str | None:
    """A list of characters in brackets, in which a backslash is itself, in Python's words."""
    inside = part[1:-1]
    begin = "^" if inside.startswith("^") else ""
    inside = inside.removeprefix("^")
    classes = re.findall(r"\[:(\w+):\]", inside)
    if "\\" in inside or any(name not in _CLASSES for name in classes):
        return None
    plain = re.sub(r"\[:\w+:\]", "", inside)
    escaped = re.sub(r"([\]\[^&~|])", r"\\\1", plain)
    return "[" + begin + escaped + "".join(_CLASSES[name] for name in classes) + "]" if plain or classes else None


def is_searchable(pattern: re.Pattern[str], line: str) -> bool:
    """True if a line is short enough to be searched for a pattern in little time."""
    num_open = sum(pattern.pattern.count(sign) for sign in ("*", "+", ",}"))
    return len(line) <= (_MOST_LINE if num_open < 2 else _MOST_SEARCHED) and "\n" not in line and line.isascii()
