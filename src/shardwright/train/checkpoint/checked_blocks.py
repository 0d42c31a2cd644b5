"""Files whose every MiB has a sum: summed while they are written, held against it whenever a part is read.

A whole file need not be read to trust a part of it: only the blocks that the part touches. Torch is not needed.
"""

import errno
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardwright.sharding.row_boxes import shape_of_box
from shardwright.train.checkpoint.manifest import BLOCK_BYTES, BrokenCheckpointError, FileIndex, StoredBox
from shardwright.train.checkpoint.storage import Storage

# What a file is not there with, or is no file of ours; fsspec raises some without a number.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


class BlockSums:
    """The CRC-32 of each block of what passes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sums: list[int] = []
        self._current = 0

    def through(self, parts: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
        """Pass the parts on, and sum them."""
        for part in parts:
            view = memoryview(part).cast("B")
            self._add(view)
            yield view

    def sums(self) -> tuple[int, ...]:
        """Sums of all blocks so far."""
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


def safetensors_header(boxes: list[StoredBox], keys: list[str]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON object, and the object, which says by key where each
    tensor lies behind it, one after the other. Which boxes of which tensors they are is told, too."""
    places = {key: [stored.name, stored.full_shape, stored.box] for key, stored in zip(keys, boxes, strict=True)}
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "boxes": json.dumps(places)}}
    start = 0
    for key, stored in zip(keys, boxes, strict=True):
        end = start + stored.num_bytes
        entries[key] = {"dtype": stored.dtype, "shape": shape_of_box(stored.box), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def telling_of_damage(name: str) -> Iterator[None]:
    """Read a file. BrokenCheckpointError where it is not there, too short, or something else than a file; that it can't
    be read now, for a disk or a network fails, says nothing of it, and passes as OSError."""
    try:
        yield
    except (OSError, EOFError) as error:
        is_ours = isinstance(error, EOFError | FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if not is_ours and getattr(error, "errno", None) not in _NO_SUCH_FILE:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BrokenCheckpointError(f"{name} can't be read: {reason}") from None


class CheckedFile:
    """Reads parts of a file, in whole blocks that are held against their sums."""

    def __init__(self, storage: Storage, name: str, index: FileIndex) -> None:
        """BrokenCheckpointError if the file is not there or of another size."""
        self._storage, self._name, self._index = storage, name, index
        self._buffer = bytearray()
        self._held = (0, 0)  # the bytes of the file that are in the buffer
        with telling_of_damage(name):
            size = storage.size(name)
        if size != index.num_bytes:
            raise BrokenCheckpointError(f"{name} has {size:,} bytes, and was written with {index.num_bytes:,}")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), valid until the next call. Raises BrokenCheckpointError, OSError."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self._index.num_bytes)
        held_begin, held_end = self._held
        if not (held_begin <= begin and end <= held_end):
            kept = b""
            if held_begin <= begin < held_end:  # the block in which the last part ended
                kept = bytes(memoryview(self._buffer)[begin - held_begin : held_end - held_begin])
            if len(self._buffer) < end - begin:
                self._buffer = bytearray(end - begin)
            self._buffer[: len(kept)] = kept
            self._fill(begin, begin + len(kept), end)
            self._held = begin, end
        offset = self._held[0]
        return memoryview(self._buffer)[start - offset : stop - offset]

    def _fill(self, begin: int, start: int, end: int) -> None:
        """Have bytes [begin, end) in the buffer, of which those before `start` are there."""
        self._held = 0, 0  # if it fails
        view = memoryview(self._buffer)
        with telling_of_damage(self._name):
            self._storage.read(self._name, start, view[start - begin : end - begin])
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            low = block * BLOCK_BYTES - begin
            high = min(low + BLOCK_BYTES, end - begin)
            if zlib.crc32(view[low:high]) != self._index.sums[block]:
                raise BrokenCheckpointError(f"{self._name} is not as it was written: byte {begin + low:,} or one of "
                                            f"the {high - low:,} from there on is another")  # fmt: skip

    def check_all(self) -> None:
        """Read the whole file. Raises BrokenCheckpointError, OSError."""
        step = 32 * BLOCK_BYTES
        for start in range(0, self._index.num_bytes, step):
            self.read(start, min(start + step, self._index.num_bytes))
