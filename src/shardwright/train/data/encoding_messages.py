"""Messages of two processes over pipes: fields as JSON, with arrays behind them as they lie in memory.

Nothing that is received is run, as it would be with pickles: a chat template is a stranger's, and where it is run is
one end of this.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")


class BrokenMessageError(ValueError):
    """A message that is not whole."""


def send(stream: IO[bytes], fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
    """Write a message. Raises OSError where nobody reads it."""
    described = [[array.dtype.str, len(array)] for array in arrays]
    raw = json.dumps({"fields": fields, "arrays": described}, default=str).encode()
    stream.write(_LENGTH.pack(len(raw)) + raw)
    for array in arrays:
        stream.write(array.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[NDArray[Any]]] | None:
    """Read a message; None where the other end is closed. Raises BrokenMessageError or OSError."""
    length = stream.read(_LENGTH.size)
    if not length:
        return None
    try:
        said = json.loads(_whole(stream, _LENGTH.unpack(length)[0]))
        arrays = [
            np.frombuffer(_whole(stream, np.dtype(dtype).itemsize * size), dtype) for dtype, size in said["arrays"]
        ]
        return said["fields"], arrays
    except (ValueError, TypeError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise BrokenMessageError(str(error)) from None


def _whole(stream: IO[bytes], size: int) -> bytes:
    raw = stream.read(size)
    if len(raw) != size:
        raise BrokenMessageError(f"{len(raw)} bytes came of {size}")
    return raw
