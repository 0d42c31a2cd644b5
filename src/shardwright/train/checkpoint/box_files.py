"""Boxes of tensors, saved and loaded through torch.distributed.checkpoint, over files of our own.

The planners say which boxes a rank has or wants, the storage how they lie in files; torch.distributed.checkpoint finds
what overlaps with what. Its own files are not used, for they are opened with pickle, and can't be trusted in part. Each
rank plans for itself: who writes what follows from the plan of the job, so that nothing needs to be agreed on.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwright.config.units import MIB
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import num_elements_of, shape_of_box
from shardwright.train.checkpoint.checked_blocks import BlockSums, CheckedFile, safetensors_header
from shardwright.train.checkpoint.manifest import (
    BrokenCheckpointError,
    FileIndex,
    StoredBox,
    data_file,
    index_file,
    to_bytes,
)
from shardwright.train.checkpoint.storage import Storage
from shardwright.train.checkpoint.whole_tensors import whole_tensors

# Each rank plans for itself, and torch.distributed.checkpoint warns of that each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# What a file is written and read in at a time.
SLAB_BYTES = 32 * MIB
# Files whose last blocks are kept for the next read.
_OPEN_FILES = 4
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor that this rank writes: its values, contiguous, in host memory."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    values: Tensor


@dataclass(frozen=True)
class WantedBox:
    """A box of a tensor that this rank needs, and what takes its values, in the box's shape, where they are there."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    take: Callable[[Tensor], None]


def save_boxes(boxes: Sequence[HeldBox], storage: Storage, folder: str, rank: int) -> bytes:
    """Write this rank's file and its index, which are durable at the end. Returns the index's bytes. Raises OSError."""
    writer = _FileWriter(storage, folder, rank)
    try:
        dcp.save({}, storage_writer=writer, planner=_HeldPlanner(boxes), no_dist=True)
    except dcp.CheckpointException as error:
        raise _cause(error) from None
    return writer.index


def load_boxes(boxes: Sequence[WantedBox], storage: Storage, folder: str, indices: list[FileIndex]) -> None:
    """Fill the boxes from a checkpoint's files. Raises BrokenCheckpointError if one is not there, or damaged."""
    try:
        reader = _FileReader(storage, folder, indices)
        dcp.load({}, storage_reader=reader, planner=_WantedPlanner(boxes), no_dist=True)
    except dcp.CheckpointException as error:
        raise _cause(error) from None


def _cause(error: dcp.CheckpointException) -> BaseException:
    """What was raised on this rank, without the wrapping."""
    return next((failure[0] for failure in error.failures.values()), error)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(shape_of_box(box)))


class _HeldPlanner(SavePlanner):
    """Each box is one item."""

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self._boxes = boxes

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """The boxes are known already."""

    def create_local_plan(self) -> SavePlan:
        """Items, those of wide number types first: so all are aligned in the file."""
        items = [
            WriteItem(
                MetadataIndex(held.name, _chunk(held.box).offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(held.box), TensorProperties(dtype=held.values.dtype), torch.Size(held.full_shape)
                ),
            )
            for i, held in enumerate(self._boxes)
        ]
        return SavePlan(sorted(items, key=lambda item: -self.resolve_data(item).dtype.itemsize))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Nobody plans for others."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing is left to plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of an item."""
        assert write_item.index.index is not None
        return self._boxes[write_item.index.index].values


class _FileWriter(StorageWriter):
    """One safetensors file, and its index."""

    def __init__(self, storage: Storage, folder: str, rank: int) -> None:
        self._storage, self._folder, self._rank = storage, folder, rank
        self.index = b""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Every writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing changes the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing changes the plan."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the header, the boxes one after the other, and the index."""
        boxes, keys = list[StoredBox](), list[str]()
        seen: Counter[str] = Counter()
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            ends = tuple((a, a + n) for a, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
            dtype = _NAMES[data.properties.dtype]
            name = item.index.fqn
            boxes.append(StoredBox(name=name, full_shape=tuple(data.size), box=ends, dtype=dtype, start_byte=0))
            keys.append(f"{name}#{seen[name]}" if seen[name] else name)
            seen[name] += 1
        header = safetensors_header(boxes, keys)
        start, placed = len(header), list[StoredBox]()
        for stored in boxes:
            placed.append(stored.model_copy(update={"start_byte": start}))
            start += stored.num_bytes

        def parts() -> Iterator[memoryview | bytes]:
            yield header
            for item in plan.items:
                values = planner.resolve_data(item)
                assert isinstance(values, Tensor)
                flat = values.contiguous().view(-1).view(torch.uint8).numpy()
                for first in range(0, len(flat), SLAB_BYTES):
                    yield flat[first : first + SLAB_BYTES].data

        sums = BlockSums()
        self._storage.write(f"{self._folder}/{data_file(self._rank)}", sums.through(parts()))
        index = FileIndex(
            file=data_file(self._rank), num_bytes=sums.num_bytes, sums=sums.sums(), boxes=tuple(placed)
        )  # fmt: skip
        self.index = to_bytes(index)
        self._storage.write(f"{self._folder}/{index_file(self._rank)}", [self.index])
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Whoever knows that all ranks have written makes the checkpoint whole."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """No path is enough to make one."""
        return False


class _WantedPlanner(LoadPlanner):
    """Every box that is wanted is filled from those that overlap it, one box after the other."""

    def __init__(self, boxes: Sequence[WantedBox]) -> None:
        self._boxes = boxes
        self._missing: list[int] = []  # elements, by box
        self._filling: tuple[int, Tensor] | None = None  # number of a box, and its values
        self._metadata: Metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Note what the checkpoint has."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """What to read, in the order of the boxes. Raises BrokenCheckpointError if it is not all there."""
        items: list[ReadItem] = []
        for number, wanted in enumerate(self._boxes):
            stored = self._metadata.state_dict_metadata.get(wanted.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise BrokenCheckpointError(f"it has no {wanted.name}")
            if tuple(stored.size) != wanted.full_shape:
                raise BrokenCheckpointError(
                    f"{wanted.name} has shape {list(stored.size)} in it, and {list(wanted.full_shape)} here"
                )
            found = create_read_items_for_chunk_list(wanted.name, stored, [_chunk(wanted.box)])
            covered = sum(torch.Size(item.lengths).numel() for item in found)
            if covered != num_elements_of(wanted.box):
                raise BrokenCheckpointError(f"{wanted.name} is not all there")
            self._missing.append(covered)
            # The number of the box goes where the number of a chunk is: there is one chunk of each.
            items += [
                ReadItem(
                    item.type, MetadataIndex(item.dest_index.fqn, item.dest_index.offset, number), item.dest_offsets,
                    item.storage_index, item.storage_offsets, item.lengths,
                )
                for item in found
            ]  # fmt: skip
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nobody plans for others."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is left to plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """There are tensors alone."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Memory for an item: a part of that of its box."""
        number = read_item.dest_index.index
        assert number is not None
        if self._filling is None or self._filling[0] != number:
            wanted = self._boxes[number]
            stored = self._metadata.state_dict_metadata[wanted.name]
            assert isinstance(stored, TensorStorageMetadata)
            self._filling = number, torch.empty(shape_of_box(wanted.box), dtype=stored.properties.dtype)
        place = tuple(slice(a, a + n) for a, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self._filling[1][place]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """An item is read. The last one of a box makes it ready."""
        assert self._filling is not None
        number, values = self._filling
        self._missing[number] -= tensor.numel()
        if not self._missing[number]:
            self._filling = None
            self._boxes[number].take(values)


class _FileReader(StorageReader):
    """Reads boxes from the files of a checkpoint, every block of them checked."""

    def __init__(self, storage: Storage, folder: str, indices: list[FileIndex]) -> None:
        self._storage, self._folder = storage, folder
        self._indices = {index.file: index for index in indices}
        self._boxes = whole_tensors(indices)
        self._open: dict[str, CheckedFile] = {}
        for index in indices:  # before memory is taken for what a file only says it has
            self._file(index.file)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Every reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the indices say, in torch.distributed.checkpoint's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=_DTYPES[boxes[0][0].dtype]), torch.Size(boxes[0][0].full_shape),
                    [_chunk(stored.box) for stored, _ in boxes],
                )
                for name, boxes in self._boxes.items()
            }
        )  # fmt: skip

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing changes the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing changes the plan."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items in their order. Raises BrokenCheckpointError."""
        for item in plan.items:
            into = planner.resolve_tensor(item)
            assert item.storage_index.index is not None
            stored, name = self._boxes[item.storage_index.fqn][item.storage_index.index]
            self._read(stored, self._file(name), tuple(item.storage_offsets), into)
            planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[name] = CheckedFile(self._storage, f"{self._folder}/{name}", self._indices[name])
        return self._open[name]

    def _read(self, stored: StoredBox, file: CheckedFile, offsets: tuple[int, ...], into: Tensor) -> None:
        """Copy a part of a stored box."""
        shape, dtype = shape_of_box(stored.box), _DTYPES[stored.dtype]
        if shape:
            _copy_slabs(file, stored.start_byte, shape, dtype, offsets=offsets, into=into)
            return
        raw = file.read(stored.start_byte, stored.start_byte + stored.num_bytes)
        into.copy_(torch.frombuffer(raw, dtype=dtype)[0])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """No path is enough to make one."""
        return False


def _copy_slabs(
    file: CheckedFile, start_byte: int, shape: tuple[int, ...], dtype: torch.dtype, *, offsets: tuple[int, ...],
    into: Tensor,
) -> None:  # fmt: skip
    """Copy a part of a tensor that lies in a file from a byte on: slabs of whole indices of its first dim, or, where
    one of them is more than a slab, that of each index by itself."""
    one_bytes = dtype.itemsize * math.prod(shape[1:])
    if one_bytes > SLAB_BYTES:
        for i in range(into.shape[0]):
            start = start_byte + (offsets[0] + i) * one_bytes
            _copy_slabs(file, start, shape[1:], dtype, offsets=offsets[1:], into=into[i])
        return
    inner = tuple(slice(a, a + n) for a, n in zip(offsets[1:], into.shape[1:], strict=True))
    step = max(1, SLAB_BYTES // one_bytes)
    for first in range(0, into.shape[0], step):
        end = min(first + step, into.shape[0])
        start = start_byte + (offsets[0] + first) * one_bytes
        raw = file.read(start, start + (end - first) * one_bytes)
        slab = torch.frombuffer(raw, dtype=dtype).view(end - first, *shape[1:])
        into[first:end] = slab[(slice(None), *inner)]


def full_shapes(indices: list[FileIndex]) -> Mapping[str, tuple[int, ...]]:
    """The full shape of every tensor that some files have parts of."""
    return {stored.name: stored.full_shape for index in indices for stored in index.boxes}
