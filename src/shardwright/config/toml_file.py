"""Read a user's TOML file: its fields, or one sentence about its fault.

Values are bounded before anything else reads them: values that can't be written as JSON (numbers beyond 64 bits,
nesting deeper than any field) would otherwise end in an error of Python.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from shardwright.config.base import error_text, printable, shortened
from shardwright.config.phrase import Phrase, say
from shardwright.config.units import MIB
from shardwright.config.user_file import AS_UTF8, FileFault, read_text

MOST_BYTES = MIB
_MOST_DEEP = 12  # plan.recompute_layers, in a section of a job, is 4 deep
MOST_VALUES = 200_000
_LARGEST = 2**63  # TOML 1.0: integers have 64 bits with their sign

# Most parts of a key such as a.b.c. Python's parser takes time and memory by the square of their number.
_MOST_PARTS = 16
# A multi-line string may end in up to two quotes of its own. A string without an end matches the remaining text, so
# that each character is read once; TOML refuses it. The end after a repetition is optional, so that the match never
# backtracks; a possessive repetition of a choice would do the same, but Python before 3.11.5 matches it wrongly.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^"\\]+|\\.|"(?!""))*(?:"{3,5})?'
    r"|'''(?:[^']+|'(?!''))*(?:'{3,5})?"
    r'|"(?:[^"\\\n]+|\\.)*"?'
    r"|'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")

# A TOMLDecodeError is a ValueError. RecursionError is for nesting too deep for Python.
TOML_ERRORS = (ValueError, RecursionError)


def read_toml(path: Path, hint: str = AS_UTF8) -> dict[str, Any]:
    """The fields in a file. `hint` is the way out if the file is no text. Raises FileFault or OSError."""
    text = read_text(path, MOST_BYTES, "TOML file", hint)
    try:
        fields = parse_toml(text)
    except RecursionError as error:
        raise FileFault(
            say(
                "{path} is not valid TOML: {error}; nest it less, at most {most} levels",
                path=path,
                error=str(error),
                most=_MOST_DEEP,
            )
        ) from None
    except ValueError as error:
        if "digits" in str(error):  # Python refuses very long integers, and its message names a Python option
            raise FileFault(
                say("{path} has a number of thousands of digits; write one of at most 64 bits", path=path)
            ) from None
        reason = error_text(error)
        first_line = reason if isinstance(reason, Phrase) else shortened((reason.splitlines() or [""])[0], 200)
        raise FileFault(
            say("{path} is not valid TOML: {first_line}; mend that line", path=path, first_line=first_line)
        ) from None
    if faults := value_faults(fields):
        raise FileFault(say("{path}: {fault}", path=path, fault=faults[0]))
    return fields


def parse_toml(text: str) -> dict[str, Any]:
    """The fields of an untrusted TOML text. Raises one of TOML_ERRORS."""
    plain = _STRING_OR_COMMENT.sub(lambda match: "" if match[0].startswith("#") else "s", text)
    if (long := _LONG_KEY.search(plain)) is not None:
        line = plain.count("\n", 0, long.start()) + 1
        raise ValueError(
            say(
                "a key has more than {most} parts (about line {line}), and no field is so deep",
                most=_MOST_PARTS,
                line=line,
            )
        )
    return tomllib.loads(text)


def value_faults(fields: dict[str, Any]) -> list[str]:
    """Faults of values that can't be read as fields: the first number beyond 64 bits, or nesting that is too deep; else
    all texts that are no UTF-8, such as names of files from a system with another encoding."""
    pending: list[tuple[str, Any, int]] = [("", fields, 0)]
    num_values, text_faults = 0, list[str]()
    while pending:
        field, value, depth = pending.pop()
        num_values += 1
        if num_values > MOST_VALUES:
            return [
                say(
                    "there are more than {most:,} values, and no job has so many; check that it is the file",
                    most=MOST_VALUES,
                )
            ]
        if depth > _MOST_DEEP:
            return [
                say(
                    "{field} is nested {depth} levels deep; fields are at most {most} levels deep",
                    field=shortened(field),
                    depth=depth,
                    most=_MOST_DEEP,
                )
            ]
        if isinstance(value, dict):
            pending += [(f"{field}.{key}" if field else key, item, depth + 1) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(f"{field}[{n}]", item, depth + 1) for n, item in reversed(list(enumerate(value)))]
        elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            return [
                say(
                    "{field} is a number of {bits} bits, and TOML's have 64 with their sign; use at most {most}",
                    field=shortened(field),
                    bits=value.bit_length(),
                    most=_LARGEST - 1,
                )
            ]
        elif isinstance(value, str) and not _is_utf8(field + value):
            text_faults.append(
                say(
                    "{field} {value} is no UTF-8 text; use another, and rename what it names",
                    field=printable(shortened(field)),
                    value=repr(shortened(value)),
                )
            )
    return text_faults


def _is_utf8(text: str) -> bool:
    """True if a text can be written as UTF-8: the system gives bytes of a name that can't be read as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
