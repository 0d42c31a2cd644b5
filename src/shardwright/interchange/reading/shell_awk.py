"""The output of awk for a text that a script itself has: programs that print fields and numbers of lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.interchange.reading.shell_arithmetic import OPERATIONS
from shardwright.interchange.reading.shell_regexes import is_searchable, python_regex
from shardwright.interchange.reading.text_lines import lines_of, text_of_lines

_RULE = re.compile(
    r"\s*(?:(END)|NR\s*(==|>|>=|<|<=|!=)\s*(\d{1,6})|/((?:[^/\\]|\\.)*)/)?\s*\{\s*print\s*([^{};]*?)\s*;?\s*\}\s*"
)
# Expressions to print: a text, a field by its number or from the last, the number of fields or of the line, or a comma.
_PART = re.compile(r'\s*(?:"([^"\\]*)"|\$(\d{1,3})|\$(NF)|\$\(\s*NF\s*-\s*(\d{1,3})\s*\)|(NF|NR)|(,))\s*')


@dataclass(frozen=True)
class _Rule:
    """A rule: the lines that it is for, and the parts that it prints, as matches of _PART."""

    is_end: bool
    comparison: str
    number: int
    chosen: re.Pattern[str] | None
    parts: tuple[re.Match[str], ...]


def awk(words: Sequence[str], text: str) -> str | None:
    """The output of awk with -F and one program for a text; None if they are not followed."""
    separator, plain, waits = "", list[str](), False
    for word in words:
        if waits:
            separator, waits = word, False
        elif word == "-F":
            waits = True
        elif word.startswith("-F"):
            separator = word[2:]
        elif word.startswith("-"):
            return None
        else:
            plain.append(word)
    if waits or len(plain) != 1 or "\\" in separator.replace("\\t", ""):
        return None
    rules = _rules(plain[0])
    if rules is None:
        return None
    lines, shown = lines_of(text), list[str]()
    fields: list[str] = []
    for number, line in enumerate(lines, 1):
        split = _fields(line, separator.replace("\\t", "\t"))
        if split is None:
            return None
        fields = split
        for rule in rules:
            if rule.chosen and not is_searchable(rule.chosen, line):
                return None
            if rule.is_end or (rule.chosen and not rule.chosen.search(line)):
                continue
            if not rule.comparison or OPERATIONS[rule.comparison](number, rule.number):
                shown.append(_printed(rule, line, fields, number))
    line = lines[-1] if lines else ""
    shown += [_printed(rule, line, fields, len(lines)) for rule in rules if rule.is_end]
    return text_of_lines(shown)


def _rules(program: str) -> list[_Rule] | None:
    rules, at = list[_Rule](), 0
    while at < len(program) and len(rules) < 20:
        rule = _RULE.match(program, at)
        if rule is None:
            return None
        parts, place = list[re.Match[str]](), 0
        while place < len(rule[5]):
            part = _PART.match(rule[5], place)
            if part is None:
                return None
            parts.append(part)
            place = part.end()
        chosen = None if rule[4] is None else python_regex(rule[4].replace("\\/", "/"), kind="extended")
        if rule[4] is not None and chosen is None:
            return None
        rules.append(_Rule(bool(rule[1]), rule[2] or "", int(rule[3] or 0), chosen, tuple(parts)))
        at = rule.end()
    return rules if rules and at >= len(program) else None


def _fields(line: str, separator: str) -> list[str] | None:
    """The fields of a line; None if the separator is not followed."""
    if separator in ("", " "):
        return line.split()
    if not line:
        return []
    if len(separator) == 1:
        return line.split(separator)
    pattern = python_regex(separator, kind="extended", finds=True)
    if pattern is None or pattern.groups or pattern.fullmatch("") or not is_searchable(pattern, line):
        return None
    return pattern.split(line)


def _printed(rule: _Rule, line: str, fields: Sequence[str], number: int) -> str:
    """Text that a rule prints for a line."""
    texts = [_value(part, line, fields, number) for part in rule.parts]
    return "".join(texts) if rule.parts else line


def _value(part: re.Match[str], line: str, fields: Sequence[str], number: int) -> str:
    text, place, last, before_last, name, comma = part.groups()
    if text is not None:
        return str(text)
    if comma:
        return " "
    if name:
        return str(number if name == "NR" else len(fields))
    at = int(place) if place is not None else len(fields) - int(before_last or 0)
    if at == 0 and place is not None:
        return line
    return fields[at - 1] if 0 < at <= len(fields) else line if at == 0 and not last else ""
