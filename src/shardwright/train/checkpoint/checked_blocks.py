"""Files with a checksum for every MiB, which is computed while a file is written and compared whenever a part is read.

A reader that needs a part of a file verifies only the blocks that the part touches. Torch is not needed.
"""

import errno
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardwright.config.base import error_text
from shardwright.config.phrase import say
from shardwright.config.user_file import system_reason
from shardwright.train.checkpoint.manifest import BLOCK_BYTES, BrokenCheckpointError, FileIndex
from shardwright.train.checkpoint.storage import Storage

# Error numbers of a file that does not exist, or is not a file that a checkpoint writes. Some errors of fsspec have no
# number.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


class BlockSums:
    """Computes the CRC-32 of each block of a stream."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sums: list[int] = []
        self._current = 0

    def through(self, parts: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
        """Yield the parts, and add them to the checksums."""
        for part in parts:
            view = memoryview(part).cast("B")
            self._add(view)
            yield view

    def sums(self) -> tuple[int, ...]:
        """The checksums of all blocks so far."""
        return (*self._sums, self._current) if self.num_bytes % BLOCK_BYTES else tuple(self._sums)

    def _add(self, view: memoryview) -> None:
        while view:
            step = min(len(view), BLOCK_BYTES - self.num_bytes % BLOCK_BYTES)
            self._current = zlib.crc32(view[:step], self._current)
            self.num_bytes += step
            if self.num_bytes % BLOCK_BYTES == 0:
                self._sums.append(self._current)
                self._current = 0
            view = view[step:]


@contextmanager
def telling_of_damage(name: str) -> Iterator[None]:
    """A context for reads of a file. If the file does not exist, is too short, or is not a regular file, the error
    becomes a BrokenCheckpointError. Other errors, as of a disk or a network, do not mean damage, and stay OSError."""
    try:
        yield
    except (OSError, EOFError) as error:
        is_damage = isinstance(error, EOFError | FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if not is_damage and getattr(error, "errno", None) not in _NO_SUCH_FILE:
            raise
        reason = system_reason(error) if isinstance(error, OSError) and error.strerror else error_text(error)
        raise BrokenCheckpointError(say("{name} can't be read: {reason}", name=name, reason=reason)) from None


class CheckedFile:
    """Reads parts of a file, in complete blocks that are compared with their checksums."""

    def __init__(self, storage: Storage, name: str, index: FileIndex) -> None:
        """Raises BrokenCheckpointError if the file does not exist or has another size than the index says."""
        self._storage, self._name, self._index = storage, name, index
        self._buffer = bytearray()
        self._buffered = (0, 0)  # the range of the file's bytes that the buffer holds
        with telling_of_damage(name):
            size = storage.size(name)
        if size != index.num_bytes:
            raise BrokenCheckpointError(
                say(
                    "{name} has {size:,} bytes, and was written with {num_bytes:,}",
                    name=name,
                    size=size,
                    num_bytes=index.num_bytes,
                )
            )

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), valid until the next call. Raises BrokenCheckpointError, OSError."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self._index.num_bytes)
        buffered_begin, buffered_end = self._buffered
        if not (buffered_begin <= begin and end <= buffered_end):
            old_bytes = b""
            if buffered_begin <= begin < buffered_end:  # the block in which the last part ended
                old_bytes = bytes(memoryview(self._buffer)[begin - buffered_begin : buffered_end - buffered_begin])
            if len(self._buffer) < end - begin:
                self._buffer = bytearray(end - begin)
            self._buffer[: len(old_bytes)] = old_bytes
            self._fill(begin, begin + len(old_bytes), end)
            self._buffered = begin, end
        offset = self._buffered[0]
        return memoryview(self._buffer)[start - offset : stop - offset]

    def _fill(self, begin: int, start: int, end: int) -> None:
        """Read bytes [start, end) into the buffer, which has bytes [begin, start) already, and check them."""
        self._buffered = 0, 0  # if the read fails, the buffer holds nothing
        view = memoryview(self._buffer)
        with telling_of_damage(self._name):
            self._storage.read(self._name, start, view[start - begin : end - begin])
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            low = block * BLOCK_BYTES - begin
            high = min(low + BLOCK_BYTES, end - begin)
            if zlib.crc32(view[low:high]) != self._index.sums[block]:
                raise BrokenCheckpointError(
                    say(
                        "{name} is not as it was written: byte {first:,} or one of the {count:,} from there on is "
                        "another",
                        name=self._name,
                        first=begin + low,
                        count=high - low,
                    )
                )

    def check_all(self) -> None:
        """Read and check the whole file. Raises BrokenCheckpointError, OSError."""
        step = 32 * BLOCK_BYTES
        for start in range(0, self._index.num_bytes, step):
            self.read(start, min(start + step, self._index.num_bytes))
