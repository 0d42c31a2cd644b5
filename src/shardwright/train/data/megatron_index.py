"""The index of a Megatron data set: PREFIX.idx, which locates documents among the token ids of PREFIX.bin.

It has a header (magic text, version, code of the ids' type, numbers of sequences and of document bounds,
little-endian), then the number of tokens of each sequence (int32), the byte at which each sequence begins (int64), and
the document bounds as numbers of sequences (int64, one more than documents). Files are memory-mapped; nothing is
copied.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.config.phrase import say
from shardwright.config.user_file import open_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
# Sequences that are checked at once.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class MegatronIndex:
    """The contents of an index: the ids' type, the number of tokens, and the tokens at which documents begin,
    ascending."""

    dtype: str
    num_tokens: int
    starts: NDArray[np.int64]


def read_index(path: Path, bin_bytes: int) -> MegatronIndex:
    """Read and check the index of a .bin file of `bin_bytes` bytes. Raises FileFault, OSError, or ValueError with the
    fault."""
    with open_file(path, what=say("index of a Megatron data set")) as file:
        raw = file.read(_HEADER.size)
        size = file.seek(0, 2)
    dtype, num_sequences, num_bounds = _header(path, raw)
    needed = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size == needed + num_sequences:
        raise ValueError(
            say(
                "{path} says of sequences what they show beside text, and a decoder reads text; leave it out", path=path
            )
        )
    if size != needed:
        raise ValueError(
            say(
                "{path} has {size:,} bytes, and {num_sequences:,} sequences and {num_bounds:,} bounds of documents "
                "take {header} + 12 x {num_sequences:,} + 8 x {num_bounds:,} = {needed:,}; copy it again, whole",
                path=path,
                size=size,
                num_sequences=num_sequences,
                num_bounds=num_bounds,
                header=_HEADER.size,
                needed=needed,
            )
        )
    if not num_sequences or not bin_bytes:
        raise ValueError(say("{path} says that there are no sequences; leave it out of data.path", path=path))
    sizes = np.asarray(np.memmap(path, "<i4", "r", _HEADER.size, (num_sequences,)))
    pointers_offset = _HEADER.size + 4 * num_sequences
    pointers = np.asarray(np.memmap(path, "<i8", "r", pointers_offset, (num_sequences,)))
    item_bytes = np.dtype(dtype).itemsize
    _check_sequences(path, sizes, pointers, item_bytes=item_bytes, bin_bytes=bin_bytes)
    bounds_offset = pointers_offset + 8 * num_sequences
    bounds = np.asarray(np.memmap(path, "<i8", "r", bounds_offset, (num_bounds,)))
    starts, num_tokens = _starts(path, bounds, pointers, item_bytes), bin_bytes // item_bytes
    return MegatronIndex(dtype, num_tokens, starts[starts < num_tokens])


def _header(path: Path, raw: bytes) -> tuple[str, int, int]:
    """The ids' type, and the numbers of sequences and of document bounds. Raises ValueError."""
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ValueError(
            say(
                "{path} does not begin as the index of a Megatron data set does ({magic}); name one that Megatron "
                'wrote, or set data.format to "tokens" if the .bin is ids and nothing else',
                path=path,
                magic=repr(_MAGIC),
            )
        )
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(raw)
    if version != 1:
        raise ValueError(
            say(
                "{path} is of version {version}, and version 1 is read; write it again with Megatron",
                path=path,
                version=version,
            )
        )
    if code not in _DTYPES:
        meaning = (
            say("{floats}, and token ids are integers", floats=_FLOATS[code])
            if code in _FLOATS
            else say("none that Megatron writes")
        )
        codes = ", ".join(f"{number} ({np.dtype(name).name})" for number, name in _DTYPES.items())
        raise ValueError(
            say(
                "{path}: the code of the ids' type is {code}, {meaning}; known are {codes}: write it again",
                path=path,
                code=code,
                meaning=meaning,
                codes=codes,
            )
        )
    return _DTYPES[code], num_sequences, num_bounds


def _check_sequences(
    path: Path, sizes: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int, bin_bytes: int
) -> None:
    """Raises ValueError unless sequences follow each other without gaps, from the first byte to the last."""
    expected = 0
    for first in range(0, len(sizes), _CHUNK):
        tokens = sizes[first : first + _CHUNK].astype(np.int64)
        if (negative := np.flatnonzero(tokens < 0)).size:
            i = int(negative[0])
            raise ValueError(
                say(
                    "{path}: sequence {sequence} has {tokens} tokens; write the data set again",
                    path=path,
                    sequence=first + i,
                    tokens=tokens[i],
                )
            )
        ends = expected + np.cumsum(tokens * item_bytes)
        begins = ends - tokens * item_bytes
        if (wrong := np.flatnonzero(pointers[first : first + _CHUNK] != begins)).size:
            i = int(wrong[0])
            raise ValueError(
                say(
                    "{path}: sequence {sequence} begins at byte {begin:,}, and those before it end at {end:,}; "
                    "sequences must follow each other: write the data set again",
                    path=path,
                    sequence=first + i,
                    begin=pointers[first + i],
                    end=begins[i],
                )
            )
        expected = int(ends[-1])
        if expected > bin_bytes:
            break
    if expected != bin_bytes:
        raise ValueError(
            say(
                "{path} has {bin_bytes:,} bytes, and its index speaks of {expected:,}; copy both files again, whole",
                path=path.with_suffix(".bin"),
                bin_bytes=bin_bytes,
                expected=expected,
            )
        )


def _starts(path: Path, bounds: NDArray[np.int64], pointers: NDArray[np.int64], item_bytes: int) -> NDArray[np.int64]:
    """The tokens at which documents begin; empty documents are left out. Raises ValueError."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(pointers) or (np.diff(bounds) < 0).any():
        head = ", ".join(map(str, bounds[:4].tolist()))
        raise ValueError(
            say(
                "{path}: documents lie between sequences {head}{more}, and these must rise from 0 to the number of "
                "sequences, {count:,}; write the data set again",
                path=path,
                head=head,
                more=" ..." if len(bounds) > 4 else "",
                count=len(pointers),
            )
        )
    first_sequences = bounds[:-1][np.diff(bounds) > 0]
    return np.unique(pointers[first_sequences] // item_bytes)
