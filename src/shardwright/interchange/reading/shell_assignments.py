"""Variables that arithmetic commands of a shell change: ((A += 2)), ((A++, B = A * 2)), let A=8 (Bash manual, 6.5)."""

import re

from shardwright.config.fault_gathering_reader import signed
from shardwright.interchange.reading.shell_arithmetic import changed_names
from shardwright.interchange.reading.shell_marks import mark, unknown_names
from shardwright.interchange.reading.shell_values import Variables

_SET = re.compile(r"\s*([A-Za-z_]\w{0,99})\s{0,9}(|[-+*/%&|^]|<<|>>)=(?!=)(.*)", re.DOTALL)
_MOST_SIGNS = 50  # of assignment in one expression, A = B = 1
_STEPPED = re.compile(r"\s*(?:([A-Za-z_]\w{0,99})\s{0,9}(\+\+|--)|(\+\+|--)\s{0,9}([A-Za-z_]\w{0,99}))\s*")


def value_with_changes(text: str, variables: Variables) -> str:
    """The value of an arithmetic command, whose changes of variables are made; a mark if it is unknown, as the
    variables are then."""
    parts = _parts(text)
    known = [_value_of(part, variables) if part.count("=") <= _MOST_SIGNS else None for part in parts]
    for part, value in zip(parts, known, strict=True):
        if value is None:
            for name in changed_names(part):
                variables.doubt(name, appends=False)
    return known[-1] if known[-1] is not None else variables.unfollowed(f"(({text.strip()}))")


def _parts(text: str) -> list[str]:
    """The expressions of a text between commas."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _value_of(part: str, variables: Variables) -> str | None:
    """The value of one expression, whose change is made; None if it is not followed."""
    if not changed_names(part):
        return variables.arithmetic(part)
    if match := _SET.fullmatch(part):
        value = _value_of(match[3], variables)
        if value is None or match[1] in variables.kept:
            return None
        if match[2]:
            value = variables.arithmetic(f"{match[1]} {match[2]} ({value})")
        variables.put(match[1], mark(match[1]) if unknown_names(value) else value)
        return value
    if match := _STEPPED.fullmatch(part):
        name, sign = match[1] or match[4], (match[2] or match[3])[0]
        before = variables.arithmetic(name)
        if signed(before) is None or name in variables.kept:
            return None
        after = variables.arithmetic(f"{name} {sign} 1")
        variables.put(name, after)
        return before if match[1] else after
    return None
