"""A TOML file of a user: its fields, or one sentence that says what is wrong with it.

Values are bounded before anything else reads them: what can't be written as JSON (numbers beyond 64 bits, nesting
deeper than any field is) would end in an error of Python's, not of ours.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text

MOST_BYTES = MIB
_MOST_DEEP = 12  # plan.recompute_layers, in a section of a job, is 4 deep
MOST_VALUES = 200_000
_LARGEST = 2**63  # TOML 1.0: integers have 64 bits with their sign

# Of a key such as a.b.c. Python's parser takes time and memory by the square of their number.
_MOST_PARTS = 16
# A text of several lines may end in up to two quotes of its own. One without an end is all that is left, so that each
# character is looked at once; TOML refuses it. What may follow a repetition may be left out, so that nothing is tried
# again; a possessive one with a choice inside would say so, but Python before 3.11.5 matches it wrongly.
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


def read_toml(path: Path, hint: str = "save it as UTF-8") -> dict[str, Any]:
    """The fields in a file. `hint` is the way out of what is no text. Raises FileFault or OSError."""
    text = read_text(path, MOST_BYTES, "TOML file", hint)
    try:
        fields = parse_toml(text)
    except RecursionError as error:
        raise FileFault(f"{path} is not valid TOML: {error}; nest it less, at most {_MOST_DEEP} levels") from None
    except ValueError as error:
        if "digits" in str(error):  # Python reads no longer whole numbers, and names an option of its own
            raise FileFault(f"{path} has a number of thousands of digits; write one of at most 64 bits") from None
        first_line = shortened((str(error).splitlines() or [""])[0], 200)
        raise FileFault(f"{path} is not valid TOML: {first_line}; mend that line") from None
    if faults := value_faults(fields):
        raise FileFault(f"{path}: {faults[0]}")
    return fields


def parse_toml(text: str) -> dict[str, Any]:
    """The fields of a stranger's TOML. Raises one of TOML_ERRORS."""
    plain = _STRING_OR_COMMENT.sub(lambda match: "" if match[0].startswith("#") else "s", text)
    if (long := _LONG_KEY.search(plain)) is not None:
        line = plain.count("\n", 0, long.start()) + 1
        raise ValueError(f"a key has more than {_MOST_PARTS} parts (about line {line}), and no field is so deep")
    return tomllib.loads(text)


def value_faults(fields: dict[str, Any]) -> list[str]:
    """Faults of values that can't be read as fields: the first number beyond 64 bits, or nesting that is too deep."""
    left: list[tuple[str, Any, int]] = [("", fields, 0)]
    seen = 0
    while left:
        where, value, depth = left.pop()
        seen += 1
        if seen > MOST_VALUES:
            return [f"there are more than {MOST_VALUES:,} values, and no job has so many; check that it is the file"]
        if depth > _MOST_DEEP:
            return [f"{shortened(where)} is nested {depth} levels deep; fields are at most {_MOST_DEEP} levels deep"]
        if isinstance(value, dict):
            left += [(f"{where}.{key}" if where else key, one, depth + 1) for key, one in reversed(value.items())]
        elif isinstance(value, list):
            left += [(f"{where}[{n}]", one, depth + 1) for n, one in reversed(list(enumerate(value)))]
        elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            return [
                f"{shortened(where)} is a number of {value.bit_length()} bits, and TOML's have 64 with their sign; use "
                f"at most {_LARGEST - 1}"
            ]
    return []
