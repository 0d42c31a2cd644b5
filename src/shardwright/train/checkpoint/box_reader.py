"""Load boxes of tensors from a checkpoint's files, through torch.distributed.checkpoint. Any ranks may have written
them."""

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

# The most files that are open at once; an open file keeps the blocks of its last read.
_OPEN_FILES = 4


def load_boxes(boxes: Sequence[WantedBox], storage: Storage, folder: str, indices: list[FileIndex]) -> None:
    """Fill the boxes from a checkpoint's files. Raises BrokenCheckpointError if a box is missing or damaged."""
    try:
        reader = _FileReader(storage, folder, indices)
        dcp.load({}, storage_reader=reader, planner=_WantedPlanner(boxes), no_dist=True)
    except dcp.CheckpointException as error:
        raise cause(error) from None


class _WantedPlanner(LoadPlanner):
    """Plans to fill each wanted box from the stored boxes that overlap it, one wanted box after the other."""

    def __init__(self, boxes: Sequence[WantedBox]) -> None:
        self._boxes = boxes
        self._missing: list[int] = []  # elements that are not read yet, by the number of the box
        self._filling: tuple[int, Tensor] | None = None  # the number of the current box, and its values
        # One buffer for all boxes in turn: new memory would cost a fault per page.
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._metadata: Metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Keep the checkpoint's metadata."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The parts of stored boxes to read, in the order of the wanted boxes. BrokenCheckpointError if one is not
        covered."""
        items: list[ReadItem] = []
        for number, wanted in enumerate(self._boxes):
            stored = self._metadata.state_dict_metadata.get(wanted.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise BrokenCheckpointError(f"it has no {wanted.name}")
            if tuple(stored.size) != wanted.full_shape:
                raise BrokenCheckpointError(
                    f"{wanted.name} has shape {list(stored.size)} in it, and {list(wanted.full_shape)} here"
                )
            box_items = create_read_items_for_chunk_list(wanted.name, stored, [chunk(wanted.box)])
            num_covered = sum(torch.Size(item.lengths).numel() for item in box_items)
            if num_covered != num_elements_of(wanted.box):
                raise BrokenCheckpointError(f"{wanted.name} is not all there")
            self._missing.append(num_covered)
            # A wanted box is one chunk, so the index field of the chunk carries the number of the box.
            items += [
                ReadItem(
                    item.type,
                    MetadataIndex(item.dest_index.fqn, item.dest_index.offset, number),
                    item.dest_offsets,
                    item.storage_index,
                    item.storage_offsets,
                    item.lengths,
                )
                for item in box_items
            ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans unchanged: each rank plans for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: a checkpoint has tensors only."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of its box's memory that an item fills."""
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
        """Note that an item is read. After the last item of a box, the box takes its values."""
        assert self._filling is not None
        number, values = self._filling
        self._missing[number] -= tensor.numel()
        if not self._missing[number]:
            self._filling = None
            self._boxes[number].take(values)


class _FileReader(StorageReader):
    """Reads boxes from the files of a checkpoint, and checks every block that it reads."""

    def __init__(self, storage: Storage, folder: str, indices: list[FileIndex]) -> None:
        self._storage, self._folder = storage, folder
        self._indices = {index.file: index for index in indices}
        self._boxes = whole_tensors(indices)
        self._open: dict[str, CheckedFile] = {}
        for index in indices:  # check all file sizes before memory is allocated for sizes that an index claims
            self._file(index.file)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The contents of the indices, as metadata of torch.distributed.checkpoint."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[boxes[0][0].dtype]),
                    torch.Size(boxes[0][0].full_shape),
                    [chunk(stored.box) for stored, _ in boxes],
                )
                for name, boxes in self._boxes.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the constructor has set up all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items in their order, and prefetch the next item meanwhile. Raises BrokenCheckpointError."""
        with ThreadPoolExecutor(1, "prefetch") as prefetcher:
            for number, item in enumerate(plan.items):
                for next_item in plan.items[number + 1 : number + 2]:
                    prefetcher.submit(self._prefetch, next_item)
                target = planner.resolve_tensor(item)
                stored, name = self._stored(item)
                self._read(stored, self._file(name), tuple(item.storage_offsets), target)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

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

    def _read(self, stored: StoredBox, file: CheckedFile, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy the part of a stored box that begins at `offsets` and has the target's shape."""
        shape, dtype = shape_of_box(stored.box), DTYPES[stored.dtype]
        if shape:
            _copy_slabs(file, stored.start_byte, shape, dtype, offsets=offsets, target=target)
            return
        raw = file.read(stored.start_byte, stored.start_byte + stored.num_bytes)
        target.copy_(torch.frombuffer(raw, dtype=dtype)[0])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: a path alone is not enough to make a reader."""
        return False


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
