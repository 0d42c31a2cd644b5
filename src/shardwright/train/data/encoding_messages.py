"""Messages between two processes over pipes: fields as JSON, followed by arrays as raw bytes.

Unlike with pickles, no received data is executed: the process at one end runs a stranger's chat template.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")


class BrokenMessageError(ValueError):
    """A message is incomplete or invalid."""


def send(stream: IO[bytes], fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
    """Write a message. Raises OSError if the other end is closed."""
    described = [[array.dtype.str, len(array)] for array in arrays]
    raw = json.dumps({"fields": fields, "arrays": described}, default=str).encode()
    stream.write(_LENGTH.pack(len(raw)) + raw)
    for array in arrays:
        stream.write(array.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[NDArray[Any]]] | None:
    """Read a message; None if the other end is closed. Raises BrokenMessageError or OSError."""
    length = stream.read(_LENGTH.size)
    if not length:
        return None
    try:
        header = json.loads(_read_exactly(stream, _LENGTH.unpack(length)[0]))
        arrays = [
            np.frombuffer(_read_exactly(stream, np.dtype(dtype).itemsize * size), dtype)
            for dtype, size in header["arrays"]
        ]
        return header["fields"], arrays
    except (ValueError, TypeError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise BrokenMessageError(str(error)) from None


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    raw = stream.read(size)
    if len(raw) != size:
        raise BrokenMessageError(f"{len(raw)} bytes came of {size}")
    return raw
