"""Save boxes of tensors through torch.distributed.checkpoint: one safetensors file and one index per rank."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwright.train.checkpoint.box_files import SLAB_BYTES, cause, chunk
from shardwright.train.checkpoint.boxes import DTYPE_NAMES, HeldBox
from shardwright.train.checkpoint.checked_blocks import BlockSums, safetensors_header
from shardwright.train.checkpoint.manifest import (
    FileIndex,
    StoredBox,
    data_file,
    index_file,
    to_bytes,
)
from shardwright.train.checkpoint.storage import Storage


def save_boxes(boxes: Sequence[HeldBox], storage: Storage, folder: str, rank: int) -> bytes:
    """Write this rank's file and its index; both are durable at the end. Returns the index's bytes. Raises OSError."""
    writer = _FileWriter(storage, folder, rank)
    try:
        dcp.save({}, storage_writer=writer, planner=_HeldPlanner(boxes), no_dist=True)
    except dcp.CheckpointException as error:
        raise cause(error) from None
    return writer.index


class _HeldPlanner(SavePlanner):
    """Plans one item per box."""

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self._boxes = boxes

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the constructor got the boxes."""

    def create_local_plan(self) -> SavePlan:
        """One item per box, wide number types first: so every box is aligned in the file."""
        items = [
            WriteItem(
                MetadataIndex(held_box.name, chunk(held_box.box).offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk(held_box.box), TensorProperties(dtype=held_box.values.dtype), torch.Size(held_box.full_shape)
                ),
            )
            for i, held_box in enumerate(self._boxes)
        ]
        return SavePlan(sorted(items, key=lambda item: -self.resolve_data(item).dtype.itemsize))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans unchanged: each rank plans for itself."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of an item."""
        assert write_item.index.index is not None
        return self._boxes[write_item.index.index].values


class _FileWriter(StorageWriter):
    """Writes one safetensors file and its index."""

    def __init__(self, storage: Storage, folder: str, rank: int) -> None:
        self._storage, self._folder, self._rank = storage, folder, rank
        self.index = b""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the constructor has set up all."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the header, then the boxes one after the other, and then the index."""
        boxes, keys = list[StoredBox](), list[str]()
        num_seen: Counter[str] = Counter()
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            box = tuple((a, a + n) for a, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
            dtype = DTYPE_NAMES[data.properties.dtype]
            name = item.index.fqn
            boxes.append(StoredBox(name=name, full_shape=tuple(data.size), box=box, dtype=dtype, start_byte=0))
            keys.append(f"{name}#{num_seen[name]}" if num_seen[name] else name)
            num_seen[name] += 1
        header = safetensors_header(boxes, keys)
        start, placed_boxes = len(header), list[StoredBox]()
        for stored in boxes:
            placed_boxes.append(stored.model_copy(update={"start_byte": start}))
            start += stored.num_bytes

        def parts() -> Iterator[memoryview | bytes]:
            yield header
            for item in plan.items:
                values = planner.resolve_data(item)
                assert isinstance(values, Tensor)
                flat = values.contiguous().view(-1).view(torch.uint8).numpy()
                for first in range(0, len(flat), SLAB_BYTES):
                    yield flat[first : first + SLAB_BYTES].data

        file, sums = data_file(self._rank), BlockSums()
        self._storage.write(f"{self._folder}/{file}", sums.through(parts()))
        index = FileIndex(file=file, num_bytes=sums.num_bytes, sums=sums.sums(), boxes=tuple(placed_boxes))
        self.index = to_bytes(index)
        self._storage.write(f"{self._folder}/{index_file(self._rank)}", [self.index])
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: rank 0 commits the checkpoint when all ranks have written (writing.py)."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: a path alone is not enough to make a writer."""
        return False
