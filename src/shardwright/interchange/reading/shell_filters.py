"""The output of commands that change a text which they read: cut, tr, sed, awk, grep, head, tail, sort, wc, bc, xargs.

Each is followed for a text that is known; `filtered` gives None for options, and for texts, for which it isn't.
"""

import re
from collections.abc import Callable, Sequence

from shardwright.interchange.reading.shell_arithmetic import Arithmetic
from shardwright.interchange.reading.shell_awk import awk
from shardwright.interchange.reading.shell_marks import mark, unknown_names
from shardwright.interchange.reading.shell_sed import grep, sed
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.reading.text_lines import lines_of, text_of_lines

_MOST_TEXT = 8192
_SUM = re.compile(r"[0-9\s()+*/%-]+")  # of whole numbers
_NO_NUMBERS = re.compile(r"\n|\*\*|\b0\d")  # what these commands take otherwise than a shell does
_SCALE = re.compile(r"^\s*scale\s*=\s*0\s*;|;\s*$")
_UNCHANGED = (["cat"], ["xargs"], ["tr", "-d", " "], ["tr", "-d", "\n"], ["tr", "-d", "\\n"])  # of an unknown word
_CLASSES = {
    "upper": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "lower": "abcdefghijklmnopqrstuvwxyz",
    "digit": "0123456789",
    "space": "\t\n\v\f\r ",
    "blank": "\t ",
}
_CLASSES |= {"alpha": _CLASSES["upper"] + _CLASSES["lower"]}
_CLASSES |= {"alnum": _CLASSES["digit"] + _CLASSES["alpha"]}
_SET_PART = re.compile(r"\[:(\w+):\]|\\([nt\\])|([A-Za-z0-9])-([A-Za-z0-9])|([^\\])", re.DOTALL)
# A line without an ending such as .sh, which GNU leaves aside first, and without a dot or ~ at its beginning.
_VERSION = re.compile(r"[A-Za-z0-9_/-]+(?:\.[0-9][A-Za-z0-9_/-]*)*")
_BEFORE_NUMBER = re.compile(r"([^0-9]*)([0-9]{1,15}|$)")
_RANGE = re.compile(r"(\d{0,5})(-?)(\d{0,5})")


def filtered(words: Sequence[str], text: str) -> tuple[str, bool] | None:
    """The output of a command for a text that it reads, and True if it succeeds; None if it is not followed."""
    if [*words] in (["bc"], ["bc", "-l"], ["bc", "-q"]):
        is_whole = words[-1] != "-l" or text.lstrip().startswith("scale") or not {*"/%"} & {*text}
        value = value_of(_SCALE.sub("", text.strip())) if is_whole else None
        return None if value is None else (f"{value}\n", True)
    if unknown_names(text):
        return (text, True) if [*words] in _UNCHANGED else None
    if len(text) > _MOST_TEXT or any(unknown_names(word) for word in words):
        return None
    if words[0] in ("grep", "egrep"):
        return grep([*(["-E"] if words[0] == "egrep" else []), *words[1:]], text)
    if words[0] not in _FILTERS:
        return None
    output = _FILTERS[words[0]](words[1:], text)
    return None if output is None else (output, True)


def value_of(expression: str) -> str | None:
    """The value of an expression of whole numbers; a mark if a name in it is unknown; None if it is none."""
    if names := unknown_names(expression):
        return mark(names[0])
    if not _SUM.fullmatch(expression) or _NO_NUMBERS.search(expression):
        return None
    try:
        return str(Arithmetic(expression, {}).value())
    except ShellFault:
        return None


def _options(words: Sequence[str], with_value: str, plain: str = "") -> dict[str, str] | None:
    """The short options of a command, with their values; None if there are others, or words that are none."""
    options: dict[str, str] = {}
    waits = ""
    for word in words:
        if waits:
            options[waits], waits = word, ""
        elif len(word) > 1 and word[0] == "-" and word[1] in with_value:
            options[word[1]] = word[2:]
            waits = "" if word[2:] else word[1]
        elif len(word) > 1 and word[0] == "-" and {*word[1:]} <= {*plain}:
            options |= dict.fromkeys(word[1:], "")
        elif word != "-":
            return None
    return None if waits else options


def _cut(words: Sequence[str], text: str) -> str | None:
    options = _options(words, "dfc", "s")
    if options is None or ("f" in options) == ("c" in options) or len(options.get("d", "\t")) != 1:
        return None
    separator, shown = options.get("d", "\t"), list[str]()
    if not text.isascii():
        return None
    for line in lines_of(text):
        parts = list(line) if "c" in options else line.split(separator)
        if "f" in options and len(parts) == 1:
            shown += [] if "s" in options else [line]
            continue
        chosen = _chosen(options.get("f") or options.get("c") or "", len(parts))
        if chosen is None:
            return None
        shown.append(("" if "c" in options else separator).join(parts[place - 1] for place in chosen))
    return text_of_lines(shown)


def _chosen(ranges: str, number: int) -> list[int] | None:
    """The places, from 1 to a number, that a list of ranges such as 1,3-5 chooses; None if it is none."""
    places = set[int]()
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or not (match[1] or match[3]) or match[1] == "0" or match[3] == "0":
            return None
        first = int(match[1] or 1)
        last = first if not match[2] else int(match[3] or number)
        if last < first and match[3]:
            return None
        places |= set(range(first, min(last, number) + 1))
    return sorted(places)


def _characters(text: str) -> str | None:
    """The characters of a set of tr; None if it is not followed."""
    at, chars = 0, list[str]()
    while at < len(text):
        part = _SET_PART.match(text, at)
        if part is None or (part[1] and part[1] not in _CLASSES) or (part[3] and part[3] > part[4]):
            return None
        if part[1]:
            chars.append(_CLASSES[part[1]])
        elif part[2]:
            chars.append({"n": "\n", "t": "\t", "\\": "\\"}[part[2]])
        elif part[3]:
            chars += map(chr, range(ord(part[3]), ord(part[4]) + 1))
        elif (part[5] == "[" and text[at + 1 : at + 2] in ("=", "")) or (part[5] == "[" and "*" in text[at:]):
            return None
        else:
            chars.append(part[5])
        at = part.end()
    return "".join(chars)


def _tr(words: Sequence[str], text: str) -> str | None:
    options = "".join(word[1:] for word in words if word.startswith("-") and len(word) > 1)
    sets = [_characters(word) for word in words if not word.startswith("-") or word == "-"]
    if None in sets or not sets or not sets[0] or not text.isascii() or len({*options}) != len(options):
        return None
    first, *others = (one or "" for one in sets)
    kind = "".join(sorted(options.replace("C", "c")))
    if kind in ("d", "cd") and not others:
        return "".join(char for char in text if (char in first) is (kind == "cd"))
    if kind == "s" and not others:
        return _squeezed(text, first)
    if kind not in ("", "s") or len(others) != 1 or not others[0]:
        return None
    if any(word.startswith("[:") for word in words) and len(first) != len(others[0]) and len(others[0]) != 1:
        return None
    second = others[0] + others[0][-1] * max(0, len(first) - len(others[0]))
    replaced = dict(zip(first, second, strict=False)) if len({*first}) == len(first) else None
    if replaced is None:
        return None
    changed = "".join(replaced.get(char, char) for char in text)
    return _squeezed(changed, others[0]) if kind == "s" else changed


def _squeezed(text: str, chars: str) -> str:
    """A text in which each run of one of the characters is one."""
    return "".join(char for place, char in enumerate(text) if not (place and char == text[place - 1] and char in chars))


def _wc(words: Sequence[str], text: str) -> str | None:
    if len(words) != 1 or not text.isascii():
        return None
    counts = {"-l": text.count("\n"), "--lines": text.count("\n"), "-w": len(text.split()), "-c": len(text)}
    return f"{counts[words[0]]}\n" if words[0] in counts else None


def _ends(words: Sequence[str], text: str, *, is_head: bool) -> str | None:
    """The first or the last lines, or characters."""
    numbers = [f"-n{word[1:]}" if re.fullmatch(r"-\d+", word) else word for word in words]
    options = _options(numbers, "nc")
    if options is None or len(options) > 1:
        return None
    value = options.get("c") or options.get("n") or "10"
    begins = not is_head and value.startswith("+")
    if not re.fullmatch(r"\+?\d{1,6}", value) or (value.startswith("+") and not begins) or value.lstrip("+") == "0":
        return None
    number = int(value.lstrip("+"))
    parts: Sequence[str] = text if "c" in options else text.splitlines(keepends=True)
    if "c" in options and not text.isascii():
        return None
    return "".join(parts[number - 1 :] if begins else parts[:number] if is_head else parts[-number:])


def _head(words: Sequence[str], text: str) -> str | None:
    return _ends(words, text, is_head=True)


def _tail(words: Sequence[str], text: str) -> str | None:
    return _ends(words, text, is_head=False)


def _sort(words: Sequence[str], text: str) -> str | None:
    """Sorted lines: all numbers by -n, else words of which every language has the same order."""
    options, lines = _options(words, "", "nruV"), lines_of(text)
    if options is None:
        return None
    if "V" in options:
        return None if "u" in options or "n" in options else _sorted_versions(lines, is_reversed="r" in options)
    pattern = r"\d{1,15}" if "n" in options else r"[a-z]*|[0-9]*"
    if not all(re.fullmatch(pattern, line) for line in lines) or len({line[:1].isdecimal() for line in lines}) > 1:
        return None
    if "u" in options:
        if "n" in options and len({*map(int, lines)}) != len({*lines}):
            return None
        lines = [*dict.fromkeys(lines)]
    ordered = sorted(lines, key=lambda line: (int(line) if "n" in options else 0, line), reverse="r" in options)
    return text_of_lines(ordered)


def _sorted_versions(lines: Sequence[str], *, is_reversed: bool) -> str | None:
    """Lines in the order of GNU's versions: numbers in them by their values, and letters before other signs. None if
    a line has signs for which that order has exceptions, or two lines have the same place."""
    if not all(_VERSION.fullmatch(line) for line in lines):
        return None
    keys = {line: _version_key(line) for line in lines}
    if len({*keys.values()}) != len(keys):
        return None
    return text_of_lines(sorted(lines, key=keys.__getitem__, reverse=is_reversed))


def _version_key(line: str) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The parts of a line by which it is compared: signs before a number, ended by the least sign, and the number."""
    parts = _BEFORE_NUMBER.findall(line)
    signs = ((*(ord(sign) + (0 if sign.isalpha() else 256) for sign in part), 0) for part, _ in parts)
    return tuple(zip(signs, (int(digits or 0) for _, digits in parts), strict=True))


def _uniq(words: Sequence[str], text: str) -> str | None:
    if words:
        return None
    lines = lines_of(text)
    return text_of_lines(line for place, line in enumerate(lines) if [line] != lines[place - 1 : place])


def _paste(words: Sequence[str], text: str) -> str | None:
    """All lines in one, with a character between them."""
    options = (
        _options(words, "d", "s")
        if not any(word.startswith("-sd") for word in words)
        else _options(
            [part for word in words for part in (["-s", f"-d{word[3:]}"] if word.startswith("-sd") else [word])],
            "d",
            "s",
        )
    )
    if options is None or "s" not in options or len(options.get("d", "\t")) != 1:
        return None
    return options.get("d", "\t").join(lines_of(text)) + "\n"


def _xargs(words: Sequence[str], text: str) -> str | None:
    if [*words] not in ([], ["echo"]) or any(char in text for char in "'\"\\"):
        return None
    return " ".join(text.split()) + "\n"


def _cat(words: Sequence[str], text: str) -> str | None:
    return text if [*words] in ([], ["-"]) else None


def _rev(words: Sequence[str], text: str) -> str | None:
    return None if words else text_of_lines([line[::-1] for line in lines_of(text)])


def _tac(words: Sequence[str], text: str) -> str | None:
    return None if words else text_of_lines(lines_of(text)[::-1])


_FILTERS: dict[str, Callable[[Sequence[str], str], str | None]] = {
    "cut": _cut,
    "tr": _tr,
    "sed": sed,
    "awk": awk,
    "gawk": awk,
    "wc": _wc,
    "head": _head,
    "tail": _tail,
    "sort": _sort,
    "uniq": _uniq,
    "paste": _paste,
    "xargs": _xargs,
    "cat": _cat,
    "rev": _rev,
    "tac": _tac,
}
