"""Boxes of tensors that a rank writes to a checkpoint or reads from one, and the files that they lie in.

Each rank writes the boxes that it holds to one safetensors file, and an index beside it. Any rank reads the boxes that
it needs from the files of all, wherever they overlap: so a checkpoint of one plan continues under any other. Which
boxes a rank writes and reads follows from the plan, so ranks need not negotiate. Nothing is unpickled, and every block
that is read is compared with its checksum.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import num_elements_of, overlap, shape_of_box
from shardwright.train.checkpoint.checked_blocks import BlockSums, CheckedFile
from shardwright.train.checkpoint.manifest import (
    BrokenCheckpointError,
    FileIndex,
    StoredBox,
    data_file,
    index_file,
    to_bytes,
)
from shardwright.train.checkpoint.safetensors_format import WrittenTensor, header_of
from shardwright.train.checkpoint.storage import Storage
from shardwright.train.checkpoint.whole_tensors import whole_tensors

# Dtypes, by the names that safetensors files have for them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bytes of a file that are written or read at a time.
SLAB_BYTES = 32 * MIB
# The most files that are open at once; an open file keeps the blocks of its last read.
_OPEN_FILES = 4


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor that this rank writes. Its values are contiguous and in host memory."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    values: Tensor


def copy_on_host(values: Tensor, mesh: Mesh) -> Tensor:
    """A contiguous copy of the values in host memory. From a device the copy is asynchronous, on the current stream."""
    values = values.detach()
    if mesh.streams is None or mesh.streams.is_on_host(values):
        return values.cpu().clone().contiguous()
    copy, _ = mesh.streams.sent(values.contiguous())
    return copy


@dataclass(frozen=True)
class WantedBox:
    """A box of a tensor that this rank reads, and a function that takes its values once they are read, in the shape of
    the box. The function must copy them, because their memory is reused."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    take: Callable[[Tensor], None]


def full_shapes(indices: list[FileIndex]) -> Mapping[str, tuple[int, ...]]:
    """The full shape of every tensor in some files, by name."""
    return {stored.name: stored.full_shape for index in indices for stored in index.boxes}


# Writing.


def save_boxes(boxes: Sequence[HeldBox], storage: Storage, folder: str, rank: int) -> bytes:
    """Write this rank's file and its index; both are durable at the end. Returns the index's bytes. Raises OSError."""
    in_order = sorted(boxes, key=lambda held: -held.values.dtype.itemsize)  # so every box is aligned in the file
    header, stored_boxes = _placed(in_order)

    def parts() -> Iterator[memoryview | bytes]:
        yield header
        for held in in_order:
            flat = held.values.contiguous().view(-1).view(torch.uint8).numpy()
            for first in range(0, len(flat), SLAB_BYTES):
                yield flat[first : first + SLAB_BYTES].data

    file, sums = data_file(rank), BlockSums()
    storage.write(f"{folder}/{file}", sums.through(parts()))
    index = to_bytes(FileIndex(file=file, num_bytes=sums.num_bytes, sums=sums.sums(), boxes=stored_boxes))
    storage.write(f"{folder}/{index_file(rank)}", [index])
    return index


def _placed(boxes: Sequence[HeldBox]) -> tuple[bytes, tuple[StoredBox, ...]]:
    """The header of a file with these boxes, one after the other, and the place of each. A tensor's first box has the
    tensor's name in the header, further ones have a number behind it."""
    tensors, labels, num_seen = list[WrittenTensor](), dict[str, object](), Counter[str]()
    for held in boxes:
        key = f"{held.name}#{num_seen[held.name]}" if num_seen[held.name] else held.name
        num_seen[held.name] += 1
        tensors.append(WrittenTensor(key, shape_of_box(held.box), DTYPE_NAMES[held.values.dtype]))
        labels[key] = [held.name, held.full_shape, held.box]
    header = header_of(tensors, {"boxes": json.dumps(labels)})
    stored_boxes, start = list[StoredBox](), len(header)
    for held, tensor in zip(boxes, tensors, strict=True):
        stored_boxes.append(
            StoredBox(name=held.name, full_shape=held.full_shape, box=held.box, dtype=tensor.dtype, start_byte=start)
        )
        start += tensor.num_bytes
    return header, tuple(stored_boxes)


# Reading.


@dataclass(frozen=True)
class _StoredPart:
    """The part of a stored box that a wanted box needs: `box`, in the coordinates of the tensor."""

    stored: StoredBox
    file: str
    box: Box


def load_boxes(boxes: Sequence[WantedBox], storage: Storage, folder: str, indices: list[FileIndex]) -> None:
    """Fill the boxes from a checkpoint's files, one after the other; the next part is prefetched meanwhile. Raises
    BrokenCheckpointError if a box is missing or damaged, OSError."""
    reader = _PartReader(storage, folder, indices)
    parts_of_boxes = [reader.parts_of(wanted) for wanted in boxes]
    upcoming = chain.from_iterable(parts_of_boxes)
    next(upcoming, None)
    # One buffer for all boxes in turn: new memory would cost a fault per page.
    memory = torch.empty(0, dtype=torch.uint8)
    with ThreadPoolExecutor(1, "prefetch") as prefetcher:
        for wanted, parts in zip(boxes, parts_of_boxes, strict=True):
            if not parts:  # the box is empty
                continue
            shape, dtype = shape_of_box(wanted.box), DTYPES[parts[0].stored.dtype]
            num_bytes = math.prod(shape) * dtype.itemsize
            if len(memory) < num_bytes:
                memory = torch.empty(num_bytes, dtype=torch.uint8)
            values = memory[:num_bytes].view(dtype).view(shape)
            for part in parts:
                if (following := next(upcoming, None)) is not None:
                    prefetcher.submit(reader.prefetch, following)
                place = zip(part.box, wanted.box, strict=True)
                reader.read(part, values[tuple(slice(low - start, high - start) for (low, high), (start, _) in place)])
            wanted.take(values)


class _PartReader:
    """Reads parts of boxes from the files of a checkpoint, and checks every block that it reads."""

    def __init__(self, storage: Storage, folder: str, indices: list[FileIndex]) -> None:
        self._storage, self._folder = storage, folder
        self._indices = {index.file: index for index in indices}
        self._tensors = whole_tensors(indices)
        self._open: dict[str, CheckedFile] = {}
        for index in indices:  # check all file sizes before memory is allocated for sizes that an index claims
            self._file(index.file)

    def parts_of(self, wanted: WantedBox) -> list[_StoredPart]:
        """The parts of stored boxes that fill a wanted box. Raises BrokenCheckpointError if they do not fill it."""
        stored_boxes = self._tensors.get(wanted.name)
        if stored_boxes is None:
            raise BrokenCheckpointError(say("it has no {name}", name=wanted.name))
        full_shape = stored_boxes[0][0].full_shape
        if full_shape != wanted.full_shape:
            raise BrokenCheckpointError(
                say(
                    "{name} has shape {shape} in it, and {wanted} here",
                    name=wanted.name,
                    shape=list(full_shape),
                    wanted=list(wanted.full_shape),
                )
            )
        parts = [
            _StoredPart(stored, file, common)
            for stored, file in stored_boxes
            if (common := overlap(wanted.box, stored.box)) is not None
        ]
        if sum(num_elements_of(part.box) for part in parts) != num_elements_of(wanted.box):
            raise BrokenCheckpointError(say("{name} is not all there", name=wanted.name))
        return parts

    def prefetch(self, part: _StoredPart) -> None:
        """Bring the bytes of a part into memory of the system, if the storage can do that."""
        if part.box:
            row_bytes = part.stored.num_bytes // shape_of_box(part.stored.box)[0]
            (low, high), (start, _) = part.box[0], part.stored.box[0]
            first_byte = part.stored.start_byte + (low - start) * row_bytes
            self._storage.prefetch(f"{self._folder}/{part.file}", first_byte, (high - low) * row_bytes)

    def read(self, part: _StoredPart, target: Tensor) -> None:
        """Copy a part to `target`, which has its shape. Raises BrokenCheckpointError, OSError."""
        stored, file = part.stored, self._file(part.file)
        shape, dtype = shape_of_box(stored.box), DTYPES[stored.dtype]
        if shape:
            offsets = tuple(low - start for (low, _), (start, _) in zip(part.box, stored.box, strict=True))
            _copy_slabs(file, stored.start_byte, shape, dtype, offsets=offsets, target=target)
            return
        raw = file.read(stored.start_byte, stored.start_byte + stored.num_bytes)
        target.copy_(torch.frombuffer(raw, dtype=dtype)[0])

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[name] = CheckedFile(self._storage, f"{self._folder}/{name}", self._indices[name])
        return self._open[name]


def _copy_slabs(
    file: CheckedFile,
    start_byte: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    offsets: tuple[int, ...],
    target: Tensor,
) -> None:
    """Copy a part of a tensor, which begins at `start_byte` of a file, in slabs of several indices of the first dim. If
    one index has more bytes than a slab, each index is copied in slabs of its own."""
    index_bytes = dtype.itemsize * math.prod(shape[1:])
    if index_bytes > SLAB_BYTES:
        for i in range(target.shape[0]):
            start = start_byte + (offsets[0] + i) * index_bytes
            _copy_slabs(file, start, shape[1:], dtype, offsets=offsets[1:], target=target[i])
        return
    inner = tuple(slice(a, a + n) for a, n in zip(offsets[1:], target.shape[1:], strict=True))
    slab_indices = max(1, SLAB_BYTES // index_bytes)
    for first in range(0, target.shape[0], slab_indices):
        end = min(first + slab_indices, target.shape[0])
        start = start_byte + (offsets[0] + first) * index_bytes
        raw = file.read(start, start + (end - first) * index_bytes)
        slab = torch.frombuffer(raw, dtype=dtype).view(end - first, *shape[1:])
        target[first:end] = slab[(slice(None), *inner)]
