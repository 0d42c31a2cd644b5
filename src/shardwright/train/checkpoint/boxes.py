"""Boxes of tensors that a rank writes or reads, as data.

The modules that save and load them (box_writer.py, box_reader.py) import torch.distributed.checkpoint, which takes half
a second. They are imported only when a rank saves or loads, so a process that only starts ranks does not pay for that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.parameter_shard import Box
from shardwright.train.checkpoint.manifest import FileIndex

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
