"""The truth of a condition of a shell, `[ ... ]` or `[[ ... ]]`."""

import re

from shardwright.config.fault_gathering_reader import signed
from shardwright.interchange.reading.shell_arithmetic import Arithmetic
from shardwright.interchange.reading.shell_expansions import compiled_pattern
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark, unknown_names
from shardwright.interchange.reading.shell_regexes import MATCHED, REGEX, is_searchable, python_regex
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import Token

_WILD = re.compile(r"[*?\[\\]")  # where the literal beginning of a pattern ends
EQUALITIES = ("=", "==", "!=")
_REGEX_SIGN = re.compile(r"[.*+?(){}|^$\[\]\\]")
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


def is_true(words: list[str], variables: Variables) -> bool | None:
    """The truth of `[ ... ]`; None if it is unknown. Tested files count as present, and unset variables as empty."""
    if "||" in words or "-o" in words:
        place = next(index for index, word in enumerate(words) if word in ("||", "-o"))
        return _joined(words, place, variables, decides=True)
    if "&&" in words or "-a" in words:
        place = next(index for index, word in enumerate(words) if word in ("&&", "-a"))
        return _joined(words, place, variables, decides=False)
    if words[:1] == ["!"]:
        truth = is_true(words[1:], variables)
        return None if truth is None else not truth
    known_parts = [UNKNOWN.sub("", word) for word in words]
    if len(words) == 1 and variables.values.keys() & {*unknown_names(words[0])}:
        return None
    if len(words) <= 1:
        return bool(known_parts and known_parts[0])
    if len(words) == 2 and words[0] in ("-n", "-z") and variables.values.keys() & {*unknown_names(words[1])}:
        return None  # the script itself made it
    if len(words) == 2:
        return {"-n": bool(known_parts[1]), "-z": not known_parts[1], "-v": words[1] in variables.values}.get(
            words[0], True if words[0] in ("-f", "-d", "-e", "-s", "-r", "-x") else None
        )
    if len(words) != 3:
        return None
    if words[1] in EQUALITIES:
        is_like = fits_pattern(words[0], words[2], variables.ignores_case)
        return None if is_like is None else is_like == (words[1] != "!=")
    if words[1] == REGEX:
        return _fits_regex(words[0], words[2], variables)
    if any(map(unknown_names, (words[0], words[2]))):
        return None
    if words[1] in _COMPARISONS and None not in (signed(words[0]), signed(words[2])):
        return bool(Arithmetic(f"{words[0]} {_COMPARISONS[words[1]]} {words[2]}", variables.values).value())
    return None


def _joined(words: list[str], place: int, variables: Variables, *, decides: bool) -> bool | None:
    """The truth of two conditions with a word at `place` between them. If the first one is `decides`, so are both, and
    the second isn't looked at."""
    first = is_true(words[:place], variables)
    if first is decides:
        return decides
    second = is_true(words[place + 1 :], variables)
    if first is None and REGEX in words[place + 1 :]:
        variables.doubt(MATCHED, appends=False)
    return decides if second is decides else None if None in (first, second) else not decides


def regex_of(token: Token, variables: Variables) -> str:
    """The expanded token as a regular expression, in which quoted signs stand for themselves; a mark if a quoted letter
    could be a sign of its own."""
    if any(piece.quoted and len(piece.text) == 1 and piece.text.isalnum() for piece in token.pieces):
        return mark(variables.text_of(token))
    texts = [(variables.text_of(Token(token.line, pieces=(piece,))), piece.quoted) for piece in token.pieces]
    return "".join(_REGEX_SIGN.sub(r"\\\g<0>", text) if quoted else text for text, quoted in texts)


def _fits_regex(text: str, pattern: str, variables: Variables) -> bool | None:
    """True if a regular expression fits a part of a text; None if that is unknown. Sets the array of what it fits."""
    case = variables.ignores_case
    is_known = case is not None and not any(map(unknown_names, (text, pattern)))
    for finds in (True, False) if is_known else ():
        regex = python_regex(pattern, kind="extended", finds=finds, ignores_case=bool(case))
        if regex is None or not is_searchable(regex, text):
            continue
        match = regex.search(text)
        if match is None or finds:
            variables.put_items(MATCHED, [part or "" for part in (match[0], *match.groups())] if match else [], False)
        else:  # it fits, and with | it may fit more than Python's first alternative
            variables.doubt(MATCHED, appends=False)
        return match is not None
    variables.doubt(MATCHED, appends=False)
    return None


def fits_pattern(text: str, pattern: str, ignores_case: bool | None = False) -> bool | None:
    """True if a text fits a pattern of file names; None if that depends on what is unknown in them. `ignores_case` is
    None where it is unknown if letters of another case fit."""
    if unknown_names(pattern) or ignores_case is None:
        return None
    if ignores_case:
        text, pattern = text.casefold(), pattern.casefold()
    if not unknown_names(text):
        compiled = compiled_pattern(pattern)
        return None if compiled is None else bool(compiled.fullmatch(text))
    known, literal = UNKNOWN.split(text)[0], _WILD.split(pattern)[0]
    if pattern == f"{literal}*" and known.startswith(literal):
        return True
    length = min(len(known), len(literal))
    return False if known[:length] != literal[:length] else None
