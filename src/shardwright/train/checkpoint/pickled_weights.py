"""Weights in torch's own files, which are pickles. They are read with `weights_only`: torch then builds tensors only,
and calls no function that the file names. Some older models exist only in this format; `convert` writes them as
safetensors.
"""

import os
import pickle
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, open_file
from shardwright.train.checkpoint.released_files import READ_DTYPES, as_fault_of, named_files
from shardwright.train.checkpoint.safetensors_format import StoredTensor
from shardwright.train.data.memory_limit import memory_limit

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_NAMES = {dtype: name for name, dtype in READ_DTYPES.items()}

# Errors that torch raises for a file that is truncated, has another format, or contains something else than tensors.
_BROKEN = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError,
    MemoryError, OverflowError, RecursionError, NotImplementedError, AssertionError,
)  # fmt: skip

# The memory that names and shapes of tensors may take besides the file, and the number of tensors that may share each
# byte: tied embeddings occur up to four times (T5).
_READING_BYTES, _MOST_SHARED = 256 * MIB, 4


class PickledFiles:
    """The tensors of a folder by name. Their values are mapped from the files."""

    def __init__(self, folder: Path) -> None:
        """Raises PlanError if a file can't be read as weights."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._values: dict[str, Tensor] = {}
        with as_fault_of(folder):
            for file in named_files(folder, PICKLED, PICKLED_INDEX):
                self._add(file)

    def view(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file."""
        return self._values[name]

    def forget(self) -> None:
        """Do nothing: torch maps the file, and the system reclaims pages when it needs memory."""

    def _add(self, path: Path) -> None:
        with open_file(path, what=say("file of weights")) as file:
            size = os.fstat(file.fileno()).st_size
            _refuse_packed(path, file, size)
        try:
            with memory_limit(2 * size + _READING_BYTES):
                contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except _BROKEN as error:
            line = shortened((str(error) or type(error).__name__).splitlines()[0], 200)
            way_out = say("save it with torch 1.6 or later, or as safetensors")
            raise FileFault(
                say(
                    "{name} can't be read as weights alone: {line}; {way_out}",
                    name=path.name,
                    line=line,
                    way_out=way_out,
                )
            ) from None
        if not isinstance(contents, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in contents.items()
        ):
            raise FileFault(say("{name} is no dict from names to tensors; save model.state_dict()", name=path.name))
        for name, value in contents.items():
            if name in self._values:
                raise FileFault(say("{tensor} is in two files; keep one", tensor=shortened(name)))
            if fault := _tensor_fault(value):
                raise FileFault(say("{name}: {tensor} {fault}", name=path.name, tensor=shortened(name), fault=fault))
            self._values[name] = value.detach()
            self.tensors[name] = StoredTensor(path, _NAMES[value.dtype], tuple(value.shape), 0, value.nbytes)
        if fault := _shared_fault(contents.values()):
            raise FileFault(say("{name}: {fault}", name=path.name, fault=fault))


def _refuse_packed(path: Path, file: BinaryIO, size: int) -> None:
    """Raises FileFault for an archive with compressed parts, which could unpack to any size. Torch never writes one."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, struct.error):
        return  # an older format, which torch reads, or no format at all, which torch reports
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise FileFault(
            say("{name} is an archive with packed parts, as torch writes none; save model.state_dict()", name=path.name)
        )


def _tensor_fault(value: Tensor) -> str:
    """Why a tensor is not a plain view of the file's bytes; "" if it is."""
    kind = "sparse" if value.layout is not torch.strided else "nested" if value.is_nested else value.device.type
    if kind != "cpu":
        return say(
            "is a {kind} tensor, and only plain ones on the CPU are read here; save model.state_dict() of such",
            kind=kind,
        )
    if value.dtype not in _NAMES:
        return say("is of {dtype}, which is not read here; save it in another number type", dtype=value.dtype)
    if value.is_neg() or value.is_conj():
        return say("is told to be negated when it is read, which is not done here; save model.state_dict() anew")
    stored_bytes = value.untyped_storage().nbytes()
    if value.nbytes > stored_bytes:
        return say(
            "of {shape} has {nbytes:,} bytes, and {stored_bytes:,} are in the file, which would be written out again "
            "and again; save it with .contiguous()",
            shape=list(value.shape),
            nbytes=value.nbytes,
            stored_bytes=stored_bytes,
        )
    return ""


def _shared_fault(values: Iterable[Tensor]) -> str:
    """Why plain tensors share the file's bytes too often; "" if they do not."""
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    num_bytes, stored_bytes = sum(value.nbytes for value in values), sum(storages.values())
    if num_bytes <= _MOST_SHARED * stored_bytes:
        return ""
    return say(
        "its tensors have {num_bytes:,} bytes, and share {stored_bytes:,} of them, more than {most_shared} times "
        "each; save a model's own tensors",
        num_bytes=num_bytes,
        stored_bytes=stored_bytes,
        most_shared=_MOST_SHARED,
    )
