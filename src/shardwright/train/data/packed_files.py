"""Decompresses files, and finds out from the beginning of a JSON file if it holds rows."""

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, open_file

UNPACKING_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError)
_JSON = re.compile(r"\.json(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
# How many bytes are read to see how a file begins.
_HEAD_BYTES = 1 << 16


def unpacked(path: Path, packed: BinaryIO) -> BinaryIO:
    """A stream of a file's decompressed bytes; `packed` is its open file."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(packed))
        case ".bz2":
            return cast(BinaryIO, bz2.open(packed))
        case ".xz":
            return cast(BinaryIO, lzma.open(packed))
        case ".zst":
            import pyarrow as pa

            return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(packed, "zstd"), MIB))
    return packed


def begins_with_list(path: Path) -> bool:
    """True if a .json file, compressed or not, is an array, and not lines of JSON."""
    return _JSON.search(path.name) is not None and _head(path).startswith(b"[")


def begins_with_rows(path: Path) -> bool:
    """True if a .json file is an array of objects, or has an object on its first line; else it is read as text."""
    head = _head(path)
    if head.startswith(b"["):
        return head[1:].lstrip().startswith(b"{")
    if not head.startswith(b"{"):
        return False
    line, end, _ = head.partition(b"\n")
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not end and len(line) > _HEAD_BYTES // 2  # a long record, of which only a part was read


def _head(path: Path) -> bytes:
    """The first bytes of a file, without leading blanks; empty if it can't be read."""
    try:
        with open_file(path) as packed, unpacked(path, packed) as stream:
            head = stream.read(_HEAD_BYTES)
    except (FileFault, *UNPACKING_ERRORS):
        return b""  # reading the file will raise the error
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()
