"""Loops of a shell that count: `for ((i=0; i<N; i++))`."""

import re
from collections.abc import Sequence

from shardwright.config.fault_gathering_reader import signed
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import Token

_COUNTED = re.compile(
    r"\s*(\w+)\s*=([^;=]+);\s*(\w+)\s*(<=|<|-le|-lt)([^;=]+);\s*(?:(\w+)\s*\+\+|\+\+\s*(\w+)|(\w+)\s*\+=\s*(\d+))\s*"
)
_NAME = re.compile(r"\s*(\w+)\s*=")


def counted(header: Sequence[Token], variables: Variables, most: int) -> tuple[str, list[str] | None, str] | None:
    """The variable of a loop that counts, the numbers that it takes, and the one that it has behind the loop; no
    numbers if they are unknown, or more than `most`. None for another loop. `header` are the words from `for` up to
    `do`."""
    kinds = [piece.kind for token in header[1:2] for piece in token.pieces]
    if kinds != ["arithmetic"]:
        return None
    text = header[1].pieces[0].text
    name = match[1] if (match := _NAME.match(text)) else ""
    whole = _COUNTED.fullmatch(text)
    if whole is None or {word for word in (whole[3], *whole.group(6, 7, 8)) if word} != {name}:
        return name, None, ""
    first, last = (signed(variables.arithmetic(expression).strip()) for expression in whole.group(2, 5))
    step = int(whole[9] or 1)
    if first is None or last is None or step < 1:
        return name, None, ""
    numbers = range(first, last + (whole[4] in ("<=", "-le")), step)
    items = [str(number) for number in numbers] if len(numbers) <= most else None
    return name, items, str(first + step * len(numbers))
