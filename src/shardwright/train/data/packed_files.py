"""Files as they were before they were packed, and what JSON files begin with: rows, or something else."""

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
# So much is looked at to say what a file begins with.
_HEAD_BYTES = 1 << 16


def unpacked(path: Path, packed: BinaryIO) -> BinaryIO:
    """The bytes of a file as they were before it was packed."""
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
    """True if a .json file, packed or not, is an array and no lines of JSON."""
    return _JSON.search(path.name) is not None and _head(path).startswith(b"[")


def begins_with_rows(path: Path) -> bool:
    """True if a .json file is an array of objects, or has an object on its first line: what else it may be is text."""
    head = _head(path)
    if head.startswith(b"["):
        return head[1:].lstrip().startswith(b"{")
    if not head.startswith(b"{"):
        return False
    line, end, _ = head.partition(b"\n")
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not end and len(line) > _HEAD_BYTES // 2  # a long record, of which the rest was not read


def _head(path: Path) -> bytes:
    """The first bytes of a file, behind blank ones; empty if it can't be read."""
    try:
        with open_file(path) as packed, unpacked(path, packed) as stream:
            head = stream.read(_HEAD_BYTES)
    except (FileFault, *UNPACKING_ERRORS):
        return b""  # which is said when it is read
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()
