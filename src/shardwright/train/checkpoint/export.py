"""Export of a checkpoint's weights to plain safetensors files: full tensors, by the full names of the parameters.

Routers' biases take part in the model's arithmetic, and are exported in their own number type. A tied head is not
written: it is the table. The checkpoint is read slab by slab and compared with its checksums; a file gets its name when
it is complete.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import cut_rows, num_elements_of
from shardwright.train.checkpoint.boxes import WantedBox, load_boxes
from shardwright.train.checkpoint.kept import indices_of
from shardwright.train.checkpoint.manifest import (
    BrokenCheckpointError,
    FileIndex,
    Manifest,
    folder_name,
)
from shardwright.train.checkpoint.safetensors_folder import Files, write_safetensors
from shardwright.train.checkpoint.safetensors_format import METADATA, WrittenTensor
from shardwright.train.checkpoint.storage import Storage
from shardwright.train.checkpoint.whole_tensors import whole_tensors

# Number types of an export by safetensors' names: first by the user's names, then as torch's dtypes.
EXPORTED = {"float32": "F32", "bf16": "BF16"}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MOST_ELEMENTS = 4 * MIB  # elements of a slab
_WEIGHT, _ROUTER_BIAS = re.compile(r"weights\.(.+)"), re.compile(r"(router\..+\.bias_E)")


@dataclass(frozen=True)
class ExportedTensor(WrittenTensor):
    """A tensor to export, and its name in the checkpoint."""

    stored_name: str

    @property
    def box(self) -> Box:
        """The box of the full tensor."""
        return tuple((0, size) for size in self.shape)


def export_weights(
    storage: Storage, manifest: Manifest, target: Path, *, dtype: str = "keep", file_bytes: int, overwrite: bool = False
) -> Files:
    """Write the weights of a checkpoint to a file, if `target` ends in .safetensors, else to a folder of files of at
    most `file_bytes`. Returns the tensors of each file.

    `dtype` is "keep" or one of EXPORTED. Raises BrokenCheckpointError, DiskFullError, and PlanError if a file exists
    that may not be overwritten.
    """
    indices = indices_of(storage, manifest)
    tensors = exported_tensors(indices, dtype)
    write = partial(_write, {tensor.name: tensor for tensor in tensors}, storage, folder_name(manifest.step), indices)
    return write_safetensors(target, tensors, write, file_bytes=file_bytes, overwrite=overwrite, other_files={})


def exported_tensors(indices: list[FileIndex], dtype: str) -> list[ExportedTensor]:
    """The tensors of a checkpoint to export, layer by layer. Raises BrokenCheckpointError."""
    tensors = []
    for stored_name, boxes in whole_tensors(indices).items():
        weight, bias, first = _WEIGHT.fullmatch(stored_name), _ROUTER_BIAS.fullmatch(stored_name), boxes[0][0]
        if weight is None and bias is None:
            continue
        if first.dtype not in TORCH or not first.full_shape:
            raise BrokenCheckpointError(
                say(
                    "{stored_name} {shape} of {dtype} is no weight",
                    stored_name=stored_name,
                    shape=list(first.full_shape),
                    dtype=first.dtype,
                )
            )
        name = (weight or bias or stored_name)[1]
        exported_dtype = EXPORTED.get(dtype, first.dtype) if weight else first.dtype
        tensors.append(ExportedTensor(name, first.full_shape, exported_dtype, stored_name))
    if not tensors:
        raise BrokenCheckpointError(say("it has no weights"))
    names = [METADATA, *(tensor.name for tensor in tensors)]
    if len(set(names)) < len(names):
        raise BrokenCheckpointError(say("two of its weights have the same name, or one that means something else"))
    return sorted(tensors, key=lambda tensor: _sort_key(tensor.name))


def _sort_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by value: layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _write(
    exported: dict[str, ExportedTensor],
    storage: Storage,
    folder: str,
    indices: list[FileIndex],
    file: IO[bytes],
    tensors: Sequence[WrittenTensor],
) -> None:
    """Write the values of tensors, slab by slab. Raises BrokenCheckpointError, OSError."""

    def take(dtype: torch.dtype, values: Tensor) -> None:
        write_values(file, values.to(dtype))

    file_tensors = [exported[tensor.name] for tensor in tensors]
    slabs = [
        WantedBox(tensor.stored_name, tensor.shape, box, partial(take, TORCH[tensor.dtype]))
        for tensor in file_tensors
        for box in slabs_of(tensor.box)
    ]
    load_boxes(slabs, storage, folder, indices)


def write_values(file: IO[bytes], values: Tensor) -> None:
    """Write the bytes of a contiguous tensor."""
    file.write(values.view(-1).view(torch.uint8).numpy().data)


def slabs_of(box: Box) -> Iterator[Box]:
    """Split a box into boxes of at most MOST_ELEMENTS, in the order of its memory."""
    num_rows = num_elements_of(box) // ((box[-1][1] - box[-1][0]) if len(box) > 1 else 1)
    for rows in cut_rows(box, 0, num_rows, MOST_ELEMENTS):
        yield rows.box
