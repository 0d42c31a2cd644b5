"""The number type of token files: chosen if a file does not state it, and checked against the ids in the file.

32-bit ids that are read as 16-bit ids are twice as many, and every second one is 0, or nearly so. All are within the
vocabulary, and a run would train on them. So the higher parts of ids are checked, in some blocks of each file.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.config.phrase import say
from shardwright.train.data.token_stream import TokenSpan

# Fewer ids do not prove a file's type.
_LEAST_IDS = 32
# The size of each of three blocks of a file that are checked: at its beginning, in its middle, and at its end.
_BLOCK_IDS = 1 << 18
_NAMES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "int64"}
_ORDINALS = {2: say("second"), 4: say("fourth"), 8: say("eighth")}
_ORDERS: tuple[Literal["<"], Literal[">"]] = ("<", ">")


def usual_type(vocab: int) -> str:
    """The type in which ids of a vocabulary are usually written."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def wider_type(span: TokenSpan, vocab: int) -> np.dtype | None:
    """The wider type in which a file of little-endian ids seems to be written: read in it, ids are within the
    vocabulary, which is very unlikely for a file of the span's own type. None if there is no such type. Raises
    OSError."""
    narrow = np.dtype(span.dtype)
    for num_bytes in (8, 4, 2):
        parts = num_bytes // narrow.itemsize
        bound = -(-vocab // (1 << 8 * narrow.itemsize))  # of the second lowest part of an id; higher parts are 0
        if parts < 2 or span.num_tokens % parts or 16 * bound > 1 << 8 * narrow.itemsize:
            continue
        for order in _ORDERS:
            if all(_is_wide(block, bound, order) for block in _blocks(span, parts)):
                return np.dtype(_NAMES[num_bytes]).newbyteorder(order)
    return None


def _is_wide(parts_NP: NDArray[np.integer], bound: int, order: str) -> bool:
    """True if ids, given as their parts, [ids, parts of each], have a second lowest part below `bound` and no higher
    ones."""
    parts_NP = parts_NP if order == "<" else parts_NP[:, ::-1]
    is_small = (parts_NP[:, 1] < bound).all() and not parts_NP[:, 2:].any()
    return bool(len(parts_NP) >= _LEAST_IDS and is_small and (parts_NP[:, 0] >= bound).any())


def fitting_type(span: TokenSpan, vocab: int) -> np.dtype | None:
    """Another type in which all checked ids of a file are within the vocabulary, although the type has many larger
    numbers; None if there is none. Raises OSError."""
    num_raw_bytes = span.num_tokens * np.dtype(span.dtype).itemsize
    raw = TokenSpan(span.path, "|u1", span.offset_bytes, num_raw_bytes)
    for num_bytes in (8, 4, 2, 1):  # the widest first: read in a narrower type, wide ids also fit, with zeros between
        if num_raw_bytes % num_bytes or 1 << 8 * num_bytes < vocab + vocab // 16 or num_bytes == 1 < vocab // 257:
            continue
        for order in _ORDERS:
            dtype = np.dtype(f"u{num_bytes}").newbyteorder(order)
            blocks = [np.ascontiguousarray(block).view(dtype) for block in _blocks(raw, num_bytes)]
            if dtype != np.dtype(span.dtype) and all(len(ids) and int(ids.max()) < vocab for ids in blocks):
                return np.dtype(_NAMES[num_bytes]).newbyteorder(order)
    return None


def _blocks(span: TokenSpan, parts: int) -> Iterator[NDArray[np.integer]]:
    """Three blocks of a file, [ids, parts], with `parts` numbers of the file for each id. Raises OSError."""
    numbers = span.open()
    rows_NP = numbers[: len(numbers) // parts * parts].reshape(-1, parts)
    for start in {0, max(0, len(rows_NP) // 2 - _BLOCK_IDS // 2), max(0, len(rows_NP) - _BLOCK_IDS)}:
        yield rows_NP[start : start + _BLOCK_IDS]


def mistaken_type(span: TokenSpan, dtype: np.dtype) -> str:
    """The fault of a file that is read in the span's type and looks like type `dtype`, with a way out."""
    narrow, times = np.dtype(span.dtype), dtype.itemsize // np.dtype(span.dtype).itemsize
    return say(
        "{path}: read as {type} it has {num_tokens:,} ids, of which only every {ordinal} is a number of any size; so "
        "do {fewer:,} ids of {other} look: {way_out}",
        path=span.path,
        type=narrow.name,
        num_tokens=span.num_tokens,
        ordinal=_ORDINALS[times],
        fewer=span.num_tokens // times,
        other=dtype.name,
        way_out=way_out_of_type(span, dtype),
    )


def way_out_of_type(span: TokenSpan, dtype: np.dtype) -> str:
    """The way out if a file has type `dtype`, and is read in the span's type."""
    if dtype.itemsize > 1 and dtype == dtype.newbyteorder(">"):
        code = f"{dtype.kind}{dtype.itemsize}"
        return say(
            "write it with the lowest byte first: numpy.fromfile(path, '>{code}').astype('<{code}').tofile(...)",
            code=code,
        )
    if span.path.suffix == ".bin" and not span.path.with_suffix(".idx").exists():
        return say('set data.token_dtype = "{other}"', other=dtype.name)
    return say("write it again as {other}", other=dtype.name)
