"""The safetensors format: the length of a JSON header, the header, and the values of the tensors one after the other.

A header gives each tensor's number type, shape and bytes by its name. It is written here from descriptions, because
values are streamed behind it, and read here, because the headers of strangers have limits: sizes are compared with the
file before anything is allocated for them. Torch is not needed.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, open_file

# Number types as the files name them, with the bytes of an element: those that are written, and those that are read.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
READ_BYTES = DTYPE_BYTES | {"F8_E4M3": 1, "F8_E5M2": 1}
METADATA = "__metadata__"  # a key of the header that names no tensor

_MOST_HEADER = 16 * MIB  # some hundred thousand tensors; published models need up to 12 MB
_MOST_DIMENSIONS, _LARGEST = 64, 2**62


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to write: its name, its shape, and its number type by safetensors' name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its number type, its shape, and its bytes [start, stop) in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_of(tensors: Iterable[WrittenTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a file with these tensors, one after the other."""
    entries: dict[str, object] = {METADATA: {"format": "pt", **(metadata or {})}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the header of a file, by name. Raises FileFault, OSError."""
    with open_file(path, what="safetensors file") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MOST_HEADER, size - 8):
            reason = say("its header would have {length:,} of {size:,} bytes", length=length, size=size)
            raise FileFault(say("{path} is no safetensors file: {reason}; fetch it again", path=path, reason=reason))
        text = file.read(length)
    try:
        header = json.loads(text)
        entries: Mapping[str, Any] = {name: value for name, value in header.items() if name != METADATA}
        tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    except FileFault:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise FileFault(
            say("{path} is no safetensors file: its header can't be read; fetch it again", path=path)
        ) from None
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    for (name, stored), (next_name, next_stored) in pairwise(in_order):
        if stored.stop > next_stored.start:  # else a small file could claim any number of tensors
            reason = say("{tensor} and {next_name} share bytes", tensor=shortened(name), next_name=shortened(next_name))
            raise FileFault(
                say(
                    "{path} is no safetensors file: {reason}; fetch it again, or save it with safetensors",
                    path=path,
                    reason=reason,
                )
            )
    return tensors


def _stored(path: Path, name: str, entry: Mapping[str, Any], begin: int, size: int) -> StoredTensor:
    """A tensor of a header's entry, whose values lie after byte `begin` of a file of `size` bytes. Raises FileFault, or
    ValueError, TypeError and KeyError for an entry of another form."""
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    # A product of larger integers could take days.
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < _LARGEST for n in (*shape, start, stop)):
        raise ValueError(name)
    if dtype not in READ_BYTES:
        raise FileFault(
            say(
                "{name}: {tensor} is of number type {dtype}, which is not read here",
                name=path.name,
                tensor=shortened(name),
                dtype=shortened(str(dtype)),
            )
        )
    num_bytes = math.prod(shape) * READ_BYTES[dtype]
    if stop - start != num_bytes or begin + stop > size:
        raise FileFault(
            say(
                "{name}: {tensor} {shape} of {dtype} takes {num_bytes:,} bytes, and has [{start:,}, {stop:,}) of "
                "{room:,}; the file is damaged or cut, fetch it again",
                name=path.name,
                tensor=shortened(name),
                shape=list(shape),
                dtype=dtype,
                num_bytes=num_bytes,
                start=start,
                stop=stop,
                room=size - begin,
            )
        )
    return StoredTensor(path, dtype, shape, begin + start, begin + stop)
