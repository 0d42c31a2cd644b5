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

from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.hugging_face.config_json import MERGE, is_adapter
from shardwright.config.phrase import say
from shardwright.config.units import MIB, counted_phrase
from shardwright.config.user_file import FileFault, read_text, system_reason
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
                raise FileFault(
                    say(
                        "{tensor} is in {first} and in {second}; keep one",
                        tensor=shortened(name),
                        first=self.tensors[name].file.name,
                        second=file.name,
                    )
                )
            self.tensors[name] = stored


@contextmanager
def as_fault_of(folder: Path) -> Iterator[None]:
    """A context for reads of a folder's files: FileFault and OSError become PlanError."""
    try:
        yield
    except FileFault as error:
        raise PlanError(say("weights {folder}", folder=str(folder)), [error_text(error)]) from None
    except OSError as error:
        raise PlanError(
            say("weights {folder}", folder=str(folder)),
            [say("{file}: {reason}; check the path", file=error.filename, reason=system_reason(error))],
        ) from None


def named_files(folder: Path, one_file: str, index_name: str) -> list[Path]:
    """The files that a folder's index names, or its only file. Raises FileFault, OSError."""
    if not folder.is_dir():
        raise FileFault(
            say("{folder} is no folder; name the folder of a model with its .safetensors files", folder=folder)
        )
    index = folder / index_name
    if not index.exists():
        if (folder / one_file).exists():
            return [folder / one_file]
        if is_adapter(folder):
            raise FileFault(say("{folder} is {merge}", folder=folder, merge=MERGE))
        pickle_name = next((f.name for f in sorted(folder.iterdir()) if f.suffix in (".bin", ".pt", ".pth")), "")
        hint = say("check it")
        if pickle_name:
            hint = say(
                "{file} is pickled; run shardwright convert {folder} --to OUT, and name that",
                file=pickle_name,
                folder=folder,
            )
        raise FileFault(
            say(
                "{folder} has neither {one_file} nor {index_name}; {hint}",
                folder=folder,
                one_file=one_file,
                index_name=index_name,
                hint=hint,
            )
        )
    try:
        weight_map = json.loads(read_text(index, _MOST_INDEX, "index")).get("weight_map")
    except (ValueError, RecursionError, AttributeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FileFault(say("{index} has no weight_map from names of tensors to files; fetch it again", index=index))
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise FileFault(
            say(
                "{index} names {outside}, which is not a file beside it",
                index=index,
                outside=repr(shortened(outside[0])),
            )
        )
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileFault(_missing_fault(missing, len(names), index))
    return [folder / name for name in names]


def _missing_fault(missing: list[str], num_files: int, index: Path) -> str:
    """The fault of files that an index names and its folder lacks."""
    files, shown = counted_phrase(len(missing), "file"), listed(missing)
    if len(missing) == 1:
        return say(
            "{files} of the {count} that {index} names is missing in {folder}: {missing}; fetch what is missing",
            files=files,
            count=num_files,
            index=index.name,
            folder=index.parent,
            missing=shown,
        )
    return say(
        "{files} of the {count} that {index} names are missing in {folder}: {missing}; fetch what is missing",
        files=files,
        count=num_files,
        index=index.name,
        folder=index.parent,
        missing=shown,
    )


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and the number of the others, as text."""
    shown = say("{listed}", listed=tuple(map(shortened, names[:most])))
    if len(names) <= most:
        return shown
    return say("{shown} and {more:,} more", shown=shown, more=len(names) - most)


def is_floating(stored: StoredTensor) -> bool:
    """True if a tensor has a number type of plain weights, not a quantised one."""
    return stored.dtype in _FLOATING
