"""A safetensors file, or a folder of them with an index, as Hugging Face's libraries read it: all of it or nothing.

NAME.safetensors                     all in one file, where a file is asked for

model-00001-of-00003.safetensors     in a folder, one after the other, none larger than asked for unless one tensor
...                                  is; only one is model.safetensors
model.safetensors.index.json         which tensor lies in which file
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import CONFIG
from shardwright.train.checkpoint.manifest import DTYPE_BYTES
from shardwright.train.checkpoint.released_companions import COMPANIONS
from shardwright.train.launch.full_disk import telling_of_full_disk

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = "__metadata__"  # in the header of a safetensors file, beside the tensors
# What an export writes into a folder, and so may overwrite there.
_OF_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
_BESIDE = {CONFIG, *COMPANIONS}


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor as it is written: its name, shape and number type, as safetensors calls that."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Files = dict[str, list[WrittenTensor]]
# Writes the values of some tensors, one after the other in their order, to a file that has its header.
WriteValues = Callable[[IO[bytes], Sequence[WrittenTensor]], None]


def write_safetensors(
    to: Path, tensors: Sequence[WrittenTensor], write: WriteValues, *, file_bytes: int, overwrite: bool,
    beside: Mapping[str, bytes],
) -> Files:  # fmt: skip
    """Write tensors to a file, if `to` ends in .safetensors, else to a folder of files of at most so many bytes, with
    the contents of other files `beside` them. Returns what each file holds.

    Raises what `write` raises, DiskFullError, and PlanError where something is there that may not be overwritten.
    """
    is_file = to.suffix == ".safetensors"
    _refuse(to, is_file, overwrite)
    files = {to.name: list(tensors)} if is_file else _in_files(tensors, file_bytes)
    with telling_of_full_disk(to, "name another place"):
        to.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            for name, held in files.items():
                with (new / name).open("xb") as file:
                    file.write(_header(held))
                    write(file, held)
                    _sync(file)
            for name, contents in {**beside, **({} if is_file else {INDEX: _index_of(files)})}.items():
                with (new / name).open("xb") as file:
                    file.write(contents)
                    _sync(file)
            _put(new / to.name if is_file else new, to, Path(scratch, "before"))
    return files


def _in_files(tensors: Sequence[WrittenTensor], most_bytes: int) -> Files:
    """Tensors by file, in their order."""
    files: list[list[WrittenTensor]] = [[]]
    held_bytes = 0
    for tensor in tensors:
        num_bytes = tensor.num_bytes
        if files[-1] and held_bytes + num_bytes > most_bytes:
            files.append([])
            held_bytes = 0
        files[-1].append(tensor)
        held_bytes += num_bytes
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": held for i, held in enumerate(files, 1)}


def _header(tensors: Sequence[WrittenTensor]) -> bytes:
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index_of(files: Files) -> bytes:
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
    subject = "--to"
    if to.is_symlink() or to.is_dir() == is_file:
        raise PlanError(subject, [f"{to} is no {'file' if is_file else 'folder'}; name another place"])
    if not is_file and (others := sorted(name for name in os.listdir(to) if not _is_ours(name))):
        raise PlanError(subject, [f"{to} has {others[0]} in it, which no export wrote; name a folder of its own"])
    if not overwrite and (is_file or os.listdir(to)):
        raise PlanError(subject, [f"{to} is there already; name another place, or say --overwrite"])


def _is_ours(name: str) -> bool:
    return name in _BESIDE or _OF_WEIGHTS.fullmatch(name) is not None


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
