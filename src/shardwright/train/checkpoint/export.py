"""The weights of a checkpoint as plain safetensors files: whole tensors, by the full names of the parameters.

    NAME.safetensors                     all in one file, where a file is asked for

    model-00001-of-00003.safetensors     in a folder, one after the other, none larger than asked for unless one tensor
    ...                                  is; only one is model.safetensors
    model.safetensors.index.json         which tensor lies in which file, as Hugging Face's libraries read it

Routers' biases are part of what a model computes, and go along in the number type that they have. A tied head is its
table. What is read is held against its sums, a slab at a time; what is written gets its name once it is whole.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.units import MIB
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import cut_rows, num_elements_of
from shardwright.train.checkpoint.box_reader import WantedBox, load_boxes
from shardwright.train.checkpoint.kept import indices_of
from shardwright.train.checkpoint.manifest import (
    DTYPE_BYTES,
    BrokenCheckpointError,
    FileIndex,
    Manifest,
    folder_name,
)
from shardwright.train.checkpoint.storage import Storage
from shardwright.train.checkpoint.whole_tensors import whole_tensors
from shardwright.train.launch.full_disk import telling_of_full_disk

# Number types to export in, by the names that a user gives, as safetensors files and torch name them.
EXPORTED = {"float32": "F32", "bf16": "BF16"}
_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHT, _ROUTER_BIAS = re.compile(r"weights\.(.+)"), re.compile(r"(router\..+\.bias_E)")
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
_METADATA = "__metadata__"  # in the header of a safetensors file, beside the tensors
_MOST_ELEMENTS = 4 * MIB  # of a slab


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor as it is exported: under which name, of which in the checkpoint, and in which number type."""

    name: str
    stored: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def box(self) -> Box:
        """All of it."""
        return tuple((0, size) for size in self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return num_elements_of(self.box) * DTYPE_BYTES[self.dtype]


def export_weights(
    storage: Storage, manifest: Manifest, to: Path, *, dtype: str = "keep", file_bytes: int, overwrite: bool = False
) -> dict[str, list[ExportedTensor]]:
    """Write the weights of a checkpoint to a file, if `to` ends in .safetensors, else to a folder of files of at most
    so many bytes. Returns what each file holds.

    `dtype` is "keep" or one of EXPORTED. Raises BrokenCheckpointError, DiskFullError, and PlanError where something is
    there that may not be overwritten.
    """
    is_file = to.suffix == ".safetensors"
    _refuse(to, is_file, overwrite)
    indices = indices_of(storage, manifest)
    tensors = exported_tensors(indices, dtype)
    files = {to.name: tensors} if is_file else _in_files(tensors, file_bytes)
    with telling_of_full_disk(to, "name another place"):
        to.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            for name, held in files.items():
                with (new / name).open("xb") as file:
                    _write(file, held, storage, folder_name(manifest.step), indices)
                    _sync(file)
            if not is_file:
                with (new / _INDEX).open("xb") as file:
                    file.write(_index_of(files))
                    _sync(file)
            _put(new / to.name if is_file else new, to, Path(scratch, "before"))
    return files


def exported_tensors(indices: list[FileIndex], dtype: str) -> list[ExportedTensor]:
    """What is exported of a checkpoint, layer by layer. Raises BrokenCheckpointError."""
    found = []
    for stored, boxes in whole_tensors(indices).items():
        weight, bias, first = _WEIGHT.fullmatch(stored), _ROUTER_BIAS.fullmatch(stored), boxes[0][0]
        if weight is None and bias is None:
            continue
        if first.dtype not in _TORCH or not first.full_shape:
            raise BrokenCheckpointError(f"{stored} {list(first.full_shape)} of {first.dtype} is no weight")
        name = (weight or bias or stored)[1]
        found.append(
            ExportedTensor(name, stored, first.full_shape, EXPORTED.get(dtype, first.dtype) if weight else first.dtype)
        )
    if not found:
        raise BrokenCheckpointError("it has no weights")
    names = [_METADATA, *(tensor.name for tensor in found)]
    if len(set(names)) < len(names):
        raise BrokenCheckpointError("two of its weights have the same name, or one that means something else")
    return sorted(found, key=lambda tensor: _in_order(tensor.name))


def _in_order(name: str) -> list[tuple[int, str]]:
    """So that layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _in_files(tensors: Sequence[ExportedTensor], most_bytes: int) -> dict[str, list[ExportedTensor]]:
    """Tensors by file, in their order."""
    files: list[list[ExportedTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(held.num_bytes for held in files[-1]) + tensor.num_bytes > most_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {_ONE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": held for i, held in enumerate(files, 1)}


def _write(
    file: IO[bytes], tensors: Sequence[ExportedTensor], storage: Storage, folder: str, indices: list[FileIndex]
) -> None:
    """A safetensors file, from one slab after the other. Raises BrokenCheckpointError, OSError."""
    file.write(_header(tensors))

    def take(dtype: torch.dtype, values: Tensor) -> None:
        file.write(values.to(dtype).view(-1).view(torch.uint8).numpy().data)

    slabs = [
        WantedBox(tensor.stored, tensor.shape, box, partial(take, _TORCH[tensor.dtype]))
        for tensor in tensors
        for box in _slabs(tensor)
    ]
    load_boxes(slabs, storage, folder, indices)


def _slabs(tensor: ExportedTensor) -> Iterator[Box]:
    """A tensor, cut into boxes that follow each other in its memory."""
    num_rows = num_elements_of(tensor.box) // (tensor.shape[-1] if len(tensor.shape) > 1 else 1)
    for rows in cut_rows(tensor.box, 0, num_rows, _MOST_ELEMENTS):
        yield rows.box


def _header(tensors: Sequence[ExportedTensor]) -> bytes:
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index_of(files: Mapping[str, list[ExportedTensor]]) -> bytes:
    total = sum(tensor.num_bytes for held in files.values() for tensor in held)
    where = {tensor.name: name for name, held in files.items() for tensor in held}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _refuse(to: Path, is_file: bool, overwrite: bool) -> None:
    """PlanError where something is in the way: all that may be overwritten is what an export wrote."""
    if not os.path.lexists(to):
        return
    subject = "checkpoint export --to"
    if to.is_symlink() or to.is_dir() == is_file:
        raise PlanError(subject, [f"{to} is no {'file' if is_file else 'folder'}; name another place"])
    if not is_file and (others := sorted(name for name in os.listdir(to) if not _OURS.fullmatch(name))):
        raise PlanError(subject, [f"{to} has {others[0]} in it, which no export wrote; name a folder of its own"])
    if not overwrite and (is_file or os.listdir(to)):
        raise PlanError(subject, [f"{to} is there already; name another place, or say --overwrite"])


def _put(new: Path, to: Path, aside: Path) -> None:
    """Give what is written its name, in place of an export that has it."""
    if new.is_dir() and to.is_dir():
        os.rename(to, aside)
        try:
            os.rename(new, to)
        except OSError:
            os.rename(aside, to)
            raise
    else:
        os.replace(new, to)
    descriptor = os.open(to.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
