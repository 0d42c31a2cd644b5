"""The output of commands that compute a number or a text from their words alone: echo, printf, seq, expr, basename."""

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

from shardwright.config.fault_gathering_reader import signed
from shardwright.interchange.reading.shell_filters import value_of
from shardwright.interchange.reading.shell_marks import unknown_names

# Commands that count the nodes of a job by the list of them.
COUNTS_NODES = re.compile(
    r"(?s)\A(?=.*\b(?:PBS_NODEFILE|COBALT_NODEFILE|SLURM_JOB_NODELIST|SLURM_NODELIST)\b)(?!.*\b(?:head|tail|grep|sed|awk)\b)"
    r".*\bwc -l\b"
)
_MOST_NUMBERS = 2000
_FORMAT = re.compile(r"%(-?)(0?)(\d{0,2})(?:\.(\d))?([sdif%])|\\(.)|%|([^%\\]+)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


def first_output(words: Sequence[str]) -> str | None:
    """The output of a command that reads nothing, with the ends of its lines; None if it is not followed."""
    name, arguments = PurePath(words[0]).name, words[1:]
    if name == "echo":
        return _echo(arguments)
    if name in ("which", "command") and len(arguments) in (1, 2) and arguments[-1][:1].isalpha():
        return f"{arguments[-1]}\n"
    if name == "expr":
        return _expr(arguments)
    if any(unknown_names(word) for word in arguments) or name not in _OUTPUTS:
        return None
    return _OUTPUTS[name](arguments)


def _echo(words: Sequence[str]) -> str | None:
    options, plain = "", [*words]
    while plain and re.fullmatch("-[neE]+", plain[0]):
        options += plain.pop(0)[1:]
    text, end = " ".join(plain), "" if "n" in options else "\n"
    if "\\" not in text:
        return text + end
    return None  # which shells take in two ways


def _expr(words: Sequence[str]) -> str | None:
    """The value of numbers and operators that are words of their own; a single word is printed as it is."""
    if len(words) == 1:
        return f"{words[0]}\n"
    if not all(re.fullmatch(r"[-+*/%()]|-?[0-9]+", word) or unknown_names(word) for word in words):
        return None
    value = value_of(" ".join(words))
    return None if value is None else f"{value}\n"


def printed(words: Sequence[str]) -> str | None:
    """The text that printf makes of a format and its arguments; None if the format is not followed."""
    if not words or words[0].startswith("-"):
        return None
    parts = [*_FORMAT.finditer(words[0])]
    if any(part[0] == "%" or (part[6] is not None and part[6] not in _ESCAPED) for part in parts):
        return None
    taken = sum(part[5] not in (None, "%") for part in parts)
    arguments, texts = [*words[1:]], list[str]()
    if len(arguments) > _MOST_NUMBERS or (taken == 0 and not arguments and not parts):
        return None
    while True:
        for part in parts:
            text = _formatted(part, arguments)
            if text is None:
                return None
            texts.append(text)
        if not arguments or not taken:
            return "".join(texts)


def _formatted(part: re.Match[str], arguments: list[str]) -> str | None:
    """A part of a format, which takes an argument; None if that is not followed."""
    is_left, has_zeros, width, places, kind, escaped, plain = part.groups()
    if plain is not None:
        return str(plain)
    if escaped is not None:
        return _ESCAPED[escaped]
    if kind == "%":
        return "%"
    word = arguments.pop(0) if arguments else ("" if kind == "s" else "0")
    if kind == "s":
        if places is not None or has_zeros or not word.isascii():
            return None
        return word.ljust(int(width or 0)) if is_left else word.rjust(int(width or 0))
    number = signed(word) if re.fullmatch(r"-?(0|[1-9]\d{0,17})", word) else None
    if number is None or (kind != "f" and places is not None) or (is_left and has_zeros):
        return None
    shown = f"{number:.{places or 6}f}" if kind == "f" else str(number)
    if has_zeros:
        return shown.zfill(int(width or 0))
    return shown.ljust(int(width or 0)) if is_left else shown.rjust(int(width or 0))


def _seq(words: Sequence[str]) -> str | None:
    separator, numbers = "\n", [*words]
    while numbers and numbers[0].startswith("-s"):
        first = numbers.pop(0)
        if first == "-s" and not numbers:
            return None
        separator = first[2:] or numbers.pop(0)
    values = [signed(word) if re.fullmatch(r"-?(0|[1-9]\d{0,8})", word) else None for word in numbers]
    known = [value for value in values if value is not None]
    if len(known) != len(values) or not 1 <= len(known) <= 3 or "\\" in separator or (known[1:2] == [0] and known[2:]):
        return None
    first_number, step, last = (
        (1, 1, known[0]) if len(known) == 1 else (known[0], known[1] if known[2:] else 1, known[-1])
    )
    places = range(first_number, last + (1 if step > 0 else -1), step)
    if len(places) > _MOST_NUMBERS:
        return None
    return separator.join(map(str, places)) + ("\n" if places else "")


def _basename(words: Sequence[str]) -> str | None:
    if len(words) not in (1, 2) or words[0].startswith("-") or not words[0]:
        return None
    last = words[0].rstrip("/").rpartition("/")[2] or "/"
    ending = words[1] if len(words) == 2 else ""
    return (last.removesuffix(ending) if last != ending else last) + "\n"


def _dirname(words: Sequence[str]) -> str | None:
    if len(words) != 1 or words[0].startswith("-"):
        return None
    parent, slash, _ = words[0].rstrip("/").rpartition("/")
    if not slash:
        return "/\n" if words[0].startswith("/") else ".\n"
    return (parent.rstrip("/") or "/") + "\n"


_OUTPUTS: dict[str, Callable[[Sequence[str]], str | None]] = {
    "printf": printed,
    "seq": _seq,
    "basename": _basename,
    "dirname": _dirname,
}
