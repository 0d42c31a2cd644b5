"""Boxes of tensors, loaded through torch.distributed.checkpoint from the files of a checkpoint, whoever wrote them."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwright.sharding.row_boxes import num_elements_of, shape_of_box
from shardwright.train.checkpoint.box_files import SLAB_BYTES, cause, chunk
from shardwright.train.checkpoint.boxes import DTYPES, WantedBox
from shardwright.train.checkpoint.checked_blocks import CheckedFile
from shardwright.train.checkpoint.manifest import (
    BrokenCheckpointError,
    FileIndex,
    StoredBox,
)
from shardwright.train.checkpoint.storage import Storage
from shardwright.train.checkpoint.whole_tensors import whole_tensors

# Files whose last blocks are kept for the next read.
_OPEN_FILES = 4


def load_boxes(boxes: Sequence[WantedBox], storage: Storage, folder: str, indices: list[FileIndex]) -> None:
    """Fill the boxes from a checkpoint's files. Raises BrokenCheckpointError if one is not there, or damaged."""
    try:
        reader = _FileReader(storage, folder, indices)
        dcp.load({}, storage_reader=reader, planner=_WantedPlanner(boxes), no_dist=True)
    except dcp.CheckpointException as error:
        raise cause(error) from None


class _WantedPlanner(LoadPlanner):
    """Every box that is wanted is filled from those that overlap it, one box after the other."""

    def __init__(self, boxes: Sequence[WantedBox]) -> None:
        self._boxes = boxes
        self._missing: list[int] = []  # elements, by box
        self._filling: tuple[int, Tensor] | None = None  # number of a box, and its values
        self._memory = torch.empty(
            0, dtype=torch.uint8
        )  # for one box after the other: fresh memory costs a fault a page
        self._metadata: Metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Note what the checkpoint has."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The boxes to read, in their order. Raises BrokenCheckpointError if it is not all there."""
        items: list[ReadItem] = []
        for number, wanted in enumerate(self._boxes):
            stored = self._metadata.state_dict_metadata.get(wanted.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise BrokenCheckpointError(f"it has no {wanted.name}")
            if tuple(stored.size) != wanted.full_shape:
                raise BrokenCheckpointError(
                    f"{wanted.name} has shape {list(stored.size)} in it, and {list(wanted.full_shape)} here"
                )
            found = create_read_items_for_chunk_list(wanted.name, stored, [chunk(wanted.box)])
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
            shape, dtype = shape_of_box(wanted.box), stored.properties.dtype
            num_bytes = math.prod(shape) * dtype.itemsize
            if len(self._memory) < num_bytes:
                self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            self._filling = number, self._memory[:num_bytes].view(dtype).view(shape)
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
        """The contents of the indices, in torch.distributed.checkpoint's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[boxes[0][0].dtype]), torch.Size(boxes[0][0].full_shape),
                    [chunk(stored.box) for stored, _ in boxes],
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
        """Read the items in their order, and let the disk read the next one meanwhile. Raises BrokenCheckpointError."""
        with ThreadPoolExecutor(1, "prefetch") as ahead:
            for number, item in enumerate(plan.items):
                for following in plan.items[number + 1 : number + 2]:
                    ahead.submit(self._prefetch, following)
                into = planner.resolve_tensor(item)
                stored, name = self._stored(item)
                self._read(stored, self._file(name), tuple(item.storage_offsets), into)
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stored(self, item: ReadItem) -> tuple[StoredBox, str]:
        assert item.storage_index.index is not None
        return self._boxes[item.storage_index.fqn][item.storage_index.index]

    def _prefetch(self, item: ReadItem) -> None:
        stored, name = self._stored(item)
        if item.lengths:
            row_bytes = stored.num_bytes // shape_of_box(stored.box)[0]
            start, num_bytes = stored.start_byte + item.storage_offsets[0] * row_bytes, item.lengths[0] * row_bytes
            self._storage.prefetch(f"{self._folder}/{name}", start, num_bytes)

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[name] = CheckedFile(self._storage, f"{self._folder}/{name}", self._indices[name])
        return self._open[name]

    def _read(self, stored: StoredBox, file: CheckedFile, offsets: tuple[int, ...], into: Tensor) -> None:
        """Copy a part of a stored box."""
        shape, dtype = shape_of_box(stored.box), DTYPES[stored.dtype]
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
