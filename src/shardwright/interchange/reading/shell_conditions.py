"""The truth of a condition of a shell, `[ ... ]` or `[[ ... ]]`."""

import re
from collections.abc import Mapping

from shardwright.config.fault_gathering_reader import signed
from shardwright.interchange.reading.shell_arithmetic import Arithmetic
from shardwright.interchange.reading.shell_expansions import compiled_pattern
from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names

_WILD = re.compile(r"[*?\[\\]")  # where the literal beginning of a pattern ends
EQUALITIES = ("=", "==", "!=")
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


def is_true(words: list[str], values: Mapping[str, object]) -> bool | None:
    """The truth of `[ ... ]` where variables have these values; None if it is unknown. Tested files count as present,
    and unset variables as empty."""
    if "||" in words or "-o" in words:
        place = next(index for index, word in enumerate(words) if word in ("||", "-o"))
        sides = (is_true(words[:place], values), is_true(words[place + 1 :], values))
        return True if True in sides else None if None in sides else False
    if "&&" in words or "-a" in words:
        place = next(index for index, word in enumerate(words) if word in ("&&", "-a"))
        both_sides = (is_true(words[:place], values), is_true(words[place + 1 :], values))
        return False if False in both_sides else None if None in both_sides else True
    if words[:1] == ["!"]:
        truth = is_true(words[1:], values)
        return None if truth is None else not truth
    known_parts = [UNKNOWN.sub("", word) for word in words]
    if len(words) == 1 and values.keys() & {*unknown_names(words[0])}:
        return None
    if len(words) <= 1:
        return bool(known_parts and known_parts[0])
    if len(words) == 2 and words[0] in ("-n", "-z") and values.keys() & {*unknown_names(words[1])}:
        return None  # the script itself made it
    if len(words) == 2:
        return {"-n": bool(known_parts[1]), "-z": not known_parts[1], "-v": words[1] in values}.get(
            words[0], True if words[0] in ("-f", "-d", "-e", "-s", "-r", "-x") else None
        )
    if len(words) != 3:
        return None
    if words[1] in EQUALITIES:
        is_like = fits_pattern(words[0], words[2])
        return None if is_like is None else is_like == (words[1] != "!=")
    if any(map(unknown_names, (words[0], words[2]))):
        return None
    if words[1] in _COMPARISONS and None not in (signed(words[0]), signed(words[2])):
        return bool(Arithmetic(f"{words[0]} {_COMPARISONS[words[1]]} {words[2]}", values).value())
    return None


def fits_pattern(text: str, pattern: str) -> bool | None:
    """True if a text fits a pattern of file names; None if that depends on what is unknown in them."""
    if unknown_names(pattern):
        return None
    if not unknown_names(text):
        compiled = compiled_pattern(pattern)
        return None if compiled is None else bool(compiled.fullmatch(text))
    known, literal = UNKNOWN.split(text)[0], _WILD.split(pattern)[0]
    if pattern == f"{literal}*" and known.startswith(literal):
        return True
    length = min(len(known), len(literal))
    return False if known[:length] != literal[:length] else None
