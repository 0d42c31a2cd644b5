"""Write a safetensors file, or a folder of them with an index, in Hugging Face's format. The write is atomic: a reader
sees all of it or nothing.

NAME.safetensors                     all tensors, if the target is a file

model-00001-of-00003.safetensors     in a folder: tensors in their order, no file larger than asked for, unless a tensor
...                                  is. A single file is model.safetensors.
model.safetensors.index.json         the file of each tensor
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import ADAPTER, CONFIG
from shardwright.config.phrase import say
from shardwright.train.checkpoint.released_companions import COMPANIONS
from shardwright.train.checkpoint.safetensors_format import WrittenTensor, header_of
from shardwright.train.launch.full_disk import telling_of_full_disk

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
# Names of files that an export writes to a folder, and so may overwrite there.
_WEIGHT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
_OTHER_FILES = {CONFIG, ADAPTER, ADAPTER_FILE, *COMPANIONS}


Files = dict[str, list[WrittenTensor]]
# A function that writes the values of some tensors, one after the other, to a file that has its header already.
WriteValues = Callable[[IO[bytes], Sequence[WrittenTensor]], None]


def write_safetensors(
    target: Path,
    tensors: Sequence[WrittenTensor],
    write: WriteValues,
    *,
    file_bytes: int,
    overwrite: bool,
    other_files: Mapping[str, bytes],
) -> Files:
    """Write tensors to a file, if `target` ends in .safetensors, else to a folder. In a folder, files of weights have
    at most `file_bytes` bytes, and `other_files`, contents by name, lie beside them; an adapter, whose configuration is
    among these, is one file without an index. Returns the tensors of each file.

    Raises the errors of `write`, DiskFullError, and PlanError if a file exists that may not be overwritten.
    """
    is_file, is_adapter = target.suffix == ".safetensors", ADAPTER in other_files
    _refuse(target, is_file, overwrite)
    one_file = target.name if is_file else ADAPTER_FILE if is_adapter else ""
    files = {one_file: list(tensors)} if one_file else _in_files(tensors, file_bytes)
    with telling_of_full_disk(target, say("name another place")):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            for name, file_tensors in files.items():
                with (new / name).open("xb") as file:
                    file.write(header_of(file_tensors))
                    write(file, file_tensors)
                    _sync(file)
            for name, contents in {**other_files, **({} if one_file else {INDEX: _index_of(files)})}.items():
                with (new / name).open("xb") as file:
                    file.write(contents)
                    _sync(file)
            _put(new / target.name if is_file else new, target, Path(scratch, "before"))
    return files


def _in_files(tensors: Sequence[WrittenTensor], most_bytes: int) -> Files:
    """The tensors, in their order, by the name of their file. A file has at most `most_bytes`, or one tensor."""
    files: list[list[WrittenTensor]] = [[]]
    file_bytes = 0
    for tensor in tensors:
        num_bytes = tensor.num_bytes
        if files[-1] and file_bytes + num_bytes > most_bytes:
            files.append([])
            file_bytes = 0
        files[-1].append(tensor)
        file_bytes += num_bytes
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": group for i, group in enumerate(files, 1)}


def _index_of(files: Files) -> bytes:
    total_bytes = sum(tensor.num_bytes for file_tensors in files.values() for tensor in file_tensors)
    file_of_tensor = {tensor.name: file for file, file_tensors in files.items() for tensor in file_tensors}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of_tensor}
    return json.dumps(index, indent=2).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _refuse(target: Path, is_file: bool, overwrite: bool) -> None:
    """PlanError if an existing file or folder may not be overwritten: an export overwrites only earlier exports."""
    if not os.path.lexists(target):
        return
    subject = "--to"
    if target.is_symlink() or target.is_dir() == is_file:
        if is_file:
            raise PlanError(subject, [say("{target} is no file; name another place", target=target)])
        raise PlanError(subject, [say("{target} is no folder; name another place", target=target)])
    if not is_file and (foreign := sorted(name for name in os.listdir(target) if not _is_exported(name))):
        raise PlanError(
            subject,
            [
                say(
                    "{target} has {foreign} in it, which no export wrote; name a folder of its own",
                    target=target,
                    foreign=foreign[0],
                )
            ],
        )
    if not overwrite and (is_file or os.listdir(target)):
        raise PlanError(
            subject, [say("{target} is there already; name another place, or say --overwrite", target=target)]
        )


def _is_exported(name: str) -> bool:
    """True if an export may have written a file of this name."""
    return name in _OTHER_FILES or _WEIGHT_FILE.fullmatch(name) is not None


def _put(new: Path, target: Path, backup: Path) -> None:
    """Rename the written file or folder to its final name, and replace an earlier export of that name."""
    if new.is_dir() and target.is_dir():
        os.rename(target, backup)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(backup, target)
            raise
    else:
        os.replace(new, target)
    descriptor = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
