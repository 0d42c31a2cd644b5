"""The safetensors files of a released model: the place of each tensor, and views of the values on the disk.

A folder has model.safetensors, or several files and model.safetensors.index.json. Tensors are views of the mapped
file, so only the elements that are used are read, and no memory is allocated for them.
"""

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.base import PlanError, shortened
from shardwright.config.hugging_face.config_json import MERGE, is_adapter
from shardwright.config.units import MIB, counted
from shardwright.config.user_file import FileFault, read_text
from shardwright.train.checkpoint.boxes import DTYPES
from shardwright.train.checkpoint.safetensors_folder import INDEX, ONE_FILE
from shardwright.train.checkpoint.safetensors_format import StoredTensor, read_header

_MOST_INDEX = 32 * MIB
READ_DTYPES = DTYPES | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_FLOATING = ("F64", "F32", "F16", "BF16")


class ReleasedFiles:
    """The tensors of a folder by name. A file is mapped when the first of its tensors is viewed."""

    def __init__(self, folder: Path, one_file: str = ONE_FILE) -> None:
        """Raises PlanError with the fault of the folder or of a header."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        with as_fault_of(folder):
            for file in named_files(folder, one_file, INDEX):
                self._add(file)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.stop - stored.start for stored in self.tensors.values())

    def view(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file. Callers must not write to it."""
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
        """Tell the system that pages which have been read are not needed again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _add(self, file: Path) -> None:
        for name, stored in read_header(file).items():
            if name in self.tensors:
                raise FileFault(f"{shortened(name)} is in {self.tensors[name].file.name} and in {file.name}; keep one")
            self.tensors[name] = stored


@contextmanager
def as_fault_of(folder: Path) -> Iterator[None]:
    """A context for reads of a folder's files: FileFault and OSError become PlanError."""
    try:
        yield
    except FileFault as error:
        raise PlanError(f"weights {folder}", [str(error)]) from None
    except OSError as error:
        raise PlanError(f"weights {folder}", [f"{error.filename}: {error.strerror}; check the path"]) from None


def named_files(folder: Path, one_file: str, index_name: str) -> list[Path]:
    """The files that a folder's index names, or its only file. Raises FileFault, OSError."""
    if not folder.is_dir():
        raise FileFault(f"{folder} is no folder; name the folder of a model with its .safetensors files")
    index = folder / index_name
    if not index.exists():
        if (folder / one_file).exists():
            return [folder / one_file]
        if is_adapter(folder):
            raise FileFault(f"{folder} is {MERGE}")
        pickle_name = next((f.name for f in sorted(folder.iterdir()) if f.suffix in (".bin", ".pt", ".pth")), "")
        convert_hint = f"{pickle_name} is pickled; run shardwright convert {folder} --to OUT, and name that"
        hint = convert_hint if pickle_name else "check it"
        raise FileFault(f"{folder} has neither {one_file} nor {index_name}; {hint}")
    try:
        weight_map = json.loads(read_text(index, _MOST_INDEX, "index")).get("weight_map")
    except (ValueError, RecursionError, AttributeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FileFault(f"{index} has no weight_map from names of tensors to files; fetch it again")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise FileFault(f"{index} names {shortened(outside[0])!r}, which is not a file beside it")
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileFault(
            f"{counted(len(missing), 'file')} of the {len(names)} that {index.name} names "
            f"{'is' if len(missing) == 1 else 'are'} missing in {folder}: {listed(missing)}; fetch what is missing"
        )
    return [folder / name for name in names]


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and the number of the others, as text."""
    remainder = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(shortened, names[:most])) + remainder


def is_floating(stored: StoredTensor) -> bool:
    """True if a tensor has a number type of plain weights, not a quantised one."""
    return stored.dtype in _FLOATING
