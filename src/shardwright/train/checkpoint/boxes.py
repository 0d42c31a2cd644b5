"""Boxes of tensors that a rank writes or needs, as data.

What saves and loads them (box_writer.py, box_reader.py) imports torch.distributed.checkpoint, which takes half a
second: it is imported where a rank is to save or load, and a process that only starts ranks has no part in that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.parameter_shard import Box
from shardwright.train.checkpoint.manifest import FileIndex

# The number types of files.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor that this rank writes: its values, contiguous, in host memory."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    values: Tensor


def copy_on_host(values: Tensor, mesh: Mesh) -> Tensor:
    """A contiguous copy of some values in host memory; of those of a device it is there once the current stream has
    come so far."""
    values = values.detach()
    if mesh.streams is None or mesh.streams.is_on_host(values):
        return values.cpu().clone().contiguous()
    copy, _ = mesh.streams.sent(values.contiguous())
    return copy


@dataclass(frozen=True)
class WantedBox:
    """A box of a tensor that this rank needs, and what takes its values, in the box's shape, where they are there: it
    copies them, for their memory is used again."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    take: Callable[[Tensor], None]


def full_shapes(indices: list[FileIndex]) -> Mapping[str, tuple[int, ...]]:
    """The full shape of every tensor that some files have parts of."""
    return {stored.name: stored.full_shape for index in indices for stored in index.boxes}
