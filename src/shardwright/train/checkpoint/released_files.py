"""The safetensors files of a released model: which tensor lies where, and its values as they lie on the disk.

A folder has model.safetensors, or several files and model.safetensors.index.json. Headers come from strangers: sizes
are held against the file before anything is read, and tensors are views of the mapped file, so that what is read is
what is looked at, and no memory is taken for it.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.config.base import PlanError, shortened
from shardwright.config.hugging_face.config_json import MERGE, is_adapter
from shardwright.config.units import MIB, counted
from shardwright.config.user_file import FileFault, open_file, read_text
from shardwright.train.checkpoint.boxes import DTYPES
from shardwright.train.checkpoint.safetensors_folder import INDEX, ONE_FILE

_MOST_HEADER, _MOST_INDEX = 16 * MIB, 32 * MIB  # of a quarter of a million tensors; published ones have 12 MB at most
_MOST_DIMENSIONS, _LARGEST = 64, 2**62
READ_DTYPES = DTYPES | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its number type, shape, and bytes [start, stop) of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class ReleasedFiles:
    """The tensors of a folder by name. Files are mapped when one of their tensors is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises PlanError with what is wrong with the folder or a header."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        with as_fault_of(folder):
            for file in named_files(folder, ONE_FILE, INDEX):
                self._add(file)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.stop - stored.start for stored in self.tensors.values())

    def view(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file, not to be written to."""
        stored = self.tensors[name]
        if stored.file not in self._maps:
            with stored.file.open("rb") as file:
                self._maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = READ_DTYPES[stored.dtype]
        if not math.prod(stored.shape):
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._maps[stored.file], dtype=dtype, count=math.prod(stored.shape), offset=stored.start
        )
        return flat.view(stored.shape)

    def forget(self) -> None:
        """Tell the system that pages which were read are not needed again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _add(self, file: Path) -> None:
        for name, stored in _read_header(file).items():
            if name in self.tensors:
                raise FileFault(f"{shortened(name)} is in {self.tensors[name].file.name} and in {file.name}; keep one")
            self.tensors[name] = stored


@contextmanager
def as_fault_of(folder: Path) -> Iterator[None]:
    """Read a folder's files. PlanError in place of what is wrong with one."""
    try:
        yield
    except FileFault as error:
        raise PlanError(f"weights {folder}", [str(error)]) from None
    except OSError as error:
        raise PlanError(f"weights {folder}", [f"{error.filename}: {error.strerror}; check the path"]) from None


def named_files(folder: Path, one_file: str, index_name: str) -> list[Path]:
    """The files of a folder, as its index names them or the one that there is. Raises FileFault, OSError."""
    if not folder.is_dir():
        raise FileFault(f"{folder} is no folder; name the folder of a model with its .safetensors files")
    index = folder / index_name
    if not index.exists():
        if (folder / one_file).exists():
            return [folder / one_file]
        if is_adapter(folder):
            raise FileFault(f"{folder} is {MERGE}")
        older = next((f.name for f in sorted(folder.iterdir()) if f.suffix in (".bin", ".pt", ".pth")), "")
        pickled = f"{older} is pickled; run shardwright convert {folder} --to OUT, and name that"
        hint = pickled if older else "check it"
        raise FileFault(f"{folder} has neither {one_file} nor {index_name}; {hint}")
    try:
        where = json.loads(read_text(index, _MOST_INDEX, "index")).get("weight_map")
    except (ValueError, RecursionError, AttributeError):
        where = None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise FileFault(f"{index} has no weight_map from names of tensors to files; fetch it again")
    names = sorted(set(where.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise FileFault(f"{index} names {shortened(outside[0])!r}, which is not a file beside it")
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileFault(
            f"{counted(len(missing), 'file')} of the {len(names)} that {index.name} names "
            f"{'is' if len(missing) == 1 else 'are'} missing in {folder}: {listed(missing)}; fetch what is missing"
        )
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises FileFault, OSError."""
    with open_file(path, what="safetensors file") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MOST_HEADER, size - 8):
            told = f"its header would have {length:,} of {size:,} bytes"
            raise FileFault(f"{path} is no safetensors file: {told}; fetch it again")
        text = file.read(length)
    try:
        header = json.loads(text)
        entries: Mapping[str, Any] = {name: value for name, value in header.items() if name != "__metadata__"}
        tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    except FileFault:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise FileFault(f"{path} is no safetensors file: its header can't be read; fetch it again") from None
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    for (before, first), (name, second) in pairwise(in_order):
        if first.stop > second.start:  # a small file could hold any number of them
            shared = f"{shortened(before)} and {shortened(name)} share bytes"
            raise FileFault(f"{path} is no safetensors file: {shared}; fetch it again, or save it with safetensors")
    return tensors


def _stored(path: Path, name: str, entry: Mapping[str, Any], begin: int, size: int) -> StoredTensor:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    # More digits would make a product that takes days.
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < _LARGEST for n in (*shape, start, stop)):
        raise ValueError(name)
    if dtype not in READ_DTYPES:
        raise FileFault(
            f"{path.name}: {shortened(name)} is of number type {shortened(str(dtype))}, which is not read here"
        )
    num_bytes = math.prod(shape) * READ_DTYPES[dtype].itemsize
    if stop - start != num_bytes or begin + stop > size:
        raise FileFault(
            f"{path.name}: {shortened(name)} {list(shape)} of {dtype} takes {num_bytes:,} bytes, and has "
            f"[{start:,}, {stop:,}) of {size - begin:,}; the file is damaged or cut, fetch it again"
        )
    return StoredTensor(path, dtype, shape, begin + start, begin + stop)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many there are more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(shortened, names[:most])) + more


def is_floating(stored: StoredTensor) -> bool:
    """True if a tensor is of numbers that weights have, and not of a quantised type."""
    return stored.dtype in _FLOATING
