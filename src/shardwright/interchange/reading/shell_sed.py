"""The output of sed and grep for a text that a script itself has: replacements, and lines that are chosen."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.interchange.reading.shell_regexes import is_searchable, python_regex
from shardwright.interchange.reading.text_lines import lines_of, text_of_lines

_ADDRESS = re.compile(r"(\d+)|(\$)|/((?:[^/\\]|\\.)*)/")
_BASIC, _EXTENDED = "basic", "extended"


@dataclass(frozen=True)
class _Step:
    """A command of sed for the lines from `first` to `last`, by number, or that fit `chosen`; for each line if there is
    neither. `first` is -1 and `last` is 0 for the last line. `name` is s, p, d or q."""

    name: str
    first: int = 0
    last: int = 0
    chosen: re.Pattern[str] | None = None
    old: re.Pattern[str] | None = None
    new: tuple[str | int, ...] = ()
    options: str = ""


def sed(words: Sequence[str], text: str) -> str | None:
    """The output of sed with options and a script for a text; None if they are not followed."""
    scripts, kind, is_quiet, plain = list[str](), _BASIC, False, list[str]()
    waits = False
    for word in words:
        if waits:
            scripts.append(word)
            waits = False
        elif word in ("-e", "--expression"):
            waits = True
        elif word in ("-n", "--quiet", "-E", "-r", "-ne", "-nE", "-nr", "-En", "-rn", "-Ee", "-re"):
            is_quiet, kind = (
                is_quiet or word == "--quiet" or "n" in word,
                _EXTENDED if {"E", "r"} & {*word[1:]} else kind,
            )
            waits = word.startswith("-") and word.endswith("e") and not word.startswith("--")
        elif word.startswith("-"):
            return None
        else:
            plain.append(word)
    scripts = scripts or plain[:1]
    if waits or not scripts or plain[1:] or (plain and plain[0] != scripts[0]):
        return None
    steps = _steps("\n".join(scripts), kind)
    if steps is None:
        return None
    lines, shown = lines_of(text), list[str]()
    for number, line in enumerate(lines, 1):
        printed = _line_after(line, number, len(lines), steps, is_quiet=is_quiet)
        if printed is None:
            return None
        shown += printed[0]
        if printed[1]:
            break
    ends = "\n" if text.endswith("\n") else ""
    return "\n".join(shown) + ends if shown else ""


def _line_after(
    line: str, number: int, num_lines: int, steps: Sequence[_Step], *, is_quiet: bool
) -> tuple[list[str], bool] | None:
    """Lines that are printed for a line, and True if nothing follows; None if it can't be told."""
    printed = list[str]()
    for step in steps:
        if any(pattern and not is_searchable(pattern, line) for pattern in (step.chosen, step.old)):
            return None
        first, last = num_lines if step.first < 0 else step.first, step.last or num_lines
        if (step.chosen and not step.chosen.search(line)) or (first and not first <= number <= last):
            continue
        if step.name == "d":
            return printed, False
        if step.name == "q":
            return [*printed, *([] if is_quiet else [line])], True
        if step.name == "p":
            printed.append(line)
        if step.name == "s" and step.old:
            count = 0 if "g" in step.options else 1
            line, num_changed = step.old.subn(lambda match, new=step.new: _filled(new, match), line, count=count)  # type: ignore[misc]
            printed += [line] if "p" in step.options and num_changed else []
    return [*printed, *([] if is_quiet else [line])], False


def _filled(new: Sequence[str | int], match: re.Match[str]) -> str:
    """A replacement with the groups of a match."""
    return "".join(part if isinstance(part, str) else match[part] or "" for part in new)


def _steps(script: str, kind: str) -> list[_Step] | None:
    """The commands of a script of sed; None if one is not followed."""
    steps, at = list[_Step](), 0
    while at < len(script):
        if script[at] in " \t;\n":
            at += 1
            continue
        step = _step(script, at, kind)
        if step is None:
            return None
        steps.append(step[0])
        at = step[1]
        if at < len(script) and script[at] not in " \t;\n":
            return None
    return steps


def _step(script: str, at: int, kind: str) -> tuple[_Step, int] | None:
    """A command of sed at a place, and the place behind it; None if it is not followed."""
    first = last = 0
    chosen: re.Pattern[str] | None = None
    if address := _ADDRESS.match(script, at):
        at = address.end()
        if address[3] is not None:
            chosen = python_regex(address[3].replace("\\/", "/"), kind=kind)
            if chosen is None or not address[3]:
                return None
        elif address[1] is not None:
            first = last = int(address[1][:6])
            if script[at : at + 1] == ",":
                end = _ADDRESS.match(script, at + 1)
                if end is None or end[3] is not None:
                    return None
                last, at = int(end[1][:6]) if end[1] else 0, end.end()
        else:
            first = -1
        if first == 0 and chosen is None:
            return None
    name = script[at : at + 1]
    if name in ("p", "d", "q") and name:
        return _Step(name, first, last, chosen), at + 1
    if name != "s" or at + 1 >= len(script):
        return None
    replaced = _replacement(script, at + 1, kind)
    if replaced is None:
        return None
    old, new, options, at = replaced
    return _Step("s", first, last, chosen, old, new, options), at


def _replacement(script: str, at: int, kind: str) -> tuple[re.Pattern[str], tuple[str | int, ...], str, int] | None:
    """OLD, NEW and OPTIONS of s/OLD/NEW/OPTIONS, and the place behind them; None if they are not followed."""
    sign, parts, place = script[at], [""], at + 1
    if sign.isalnum() or sign in "\\\n ":
        return None
    while place < len(script) and len(parts) < 3:
        char = script[place]
        if char == "\\" and place + 1 < len(script):
            pair = script[place + 1]
            parts[-1] += pair if pair == sign and sign not in "|()+?{}.*[]^$&" else char + pair
            place += 1
        elif char == sign:
            parts.append("")
        elif char == "\n":
            return None
        else:
            parts[-1] += char
        place += 1
    end = place
    while end < len(script) and script[end] in "gpI":
        end += 1
    if len(parts) < 3 or not parts[0]:
        return None
    options = script[place:end]
    old = python_regex(parts[0], kind=kind, finds=True, ignores_case="I" in options)
    new = _new_text(parts[1])
    if old is None or new is None or any(isinstance(part, int) and part > old.groups for part in new):
        return None
    return old, new, options, end


def _new_text(text: str) -> tuple[str | int, ...] | None:
    """The parts of a replacement: texts, and numbers of groups, 0 for all that fits; None if it is not followed."""
    parts: list[str | int] = []
    for part in re.findall(r"\\.|[^\\]", text, re.DOTALL):
        if part == "&":
            parts.append(0)
        elif len(part) == 1:
            parts.append(part)
        elif part[1].isdecimal():
            parts.append(int(part[1]))
        elif part[1] in "nt":
            parts.append({"n": "\n", "t": "\t"}[part[1]])
        elif part[1].isalpha():
            return None
        else:
            parts.append(part[1])
    return tuple(parts)


def grep(words: Sequence[str], text: str) -> tuple[str, bool] | None:
    """The output of grep for a text, and True if a line fits; None if it is not followed."""
    options, plain = "", list[str]()
    end = words.index("--") if "--" in words else len(words)  # of the options
    for word in words[:end]:
        if word.startswith("--") or (word.startswith("-") and not {*word[1:]} <= {*"qoEivcFPe"}):
            return None
        if word.startswith("-") and len(word) > 1:
            options += word[1:]
        else:
            plain.append(word)
    plain += words[end + 1 :]
    if len(plain) != 1 or ("o" in options and {*options} & {*"cv"}):
        return None
    kind = "perl" if "P" in options else _EXTENDED if "E" in options else _BASIC
    before, kept, searched = plain[0].partition("\\K") if kind == "perl" else ("", "", plain[0])
    searched, before = (searched, before) if kept else (before or searched, "")
    finds = "o" in options
    if "F" in options:
        pattern = re.compile(re.escape(searched), re.IGNORECASE if "i" in options else 0)
    else:
        whole = f"{before}({searched})" if (before and not before[-1].isalnum()) or kept else searched
        pattern = python_regex(whole, kind=kind, finds=finds, ignores_case="i" in options)  # type: ignore[assignment]
    if pattern is None or (kept and not finds) or (kept and pattern.groups != 1):
        return None
    lines, shown = lines_of(text), list[str]()
    for line in lines:
        if not is_searchable(pattern, line):
            return None
        if bool(pattern.search(line)) is ("v" not in options):
            shown += [match[1 if kept else 0] for match in pattern.finditer(line)] if finds else [line]
    shown = [line for line in shown if line] if finds else shown
    if "q" in options:
        return "", bool(shown)
    if "c" in options:
        return f"{len(shown)}\n", bool(shown)
    return text_of_lines(shown), bool(shown)
