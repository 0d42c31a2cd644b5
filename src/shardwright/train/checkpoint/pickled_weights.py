"""Weights in torch's own files, which are pickles: read by torch's reader of weights, `weights_only`, which makes
tensors and calls nothing that a file names. Older models are published so alone; `convert` writes them as safetensors.
"""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.base import shortened
from shardwright.config.user_file import FileFault, open_file
from shardwright.train.checkpoint.released_files import READ_DTYPES, StoredTensor, as_fault_of, named_files

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_NAMES = {dtype: name for name, dtype in READ_DTYPES.items()}


# What torch raises of a file that is cut, of another kind, or names what is no tensor.
_BROKEN = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError,
)  # fmt: skip


class PickledFiles:
    """The tensors of a folder by name. Values stay mapped."""

    def __init__(self, folder: Path) -> None:
        """Raises PlanError."""
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
        """Do nothing: torch maps the file, and the system takes pages back when it needs them."""

    def _add(self, path: Path) -> None:
        with open_file(path, what="file of weights"):
            pass  # it is a regular file
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except _BROKEN as error:
            line = shortened((str(error) or type(error).__name__).splitlines()[0], 200)
            way_out = "save it with torch 1.6 or later, or as safetensors"
            raise FileFault(f"{path.name} can't be read as weights alone: {line}; {way_out}") from None
        if not isinstance(held, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in held.items()
        ):
            raise FileFault(f"{path.name} is no dict from names to tensors; save model.state_dict()")
        for name, value in held.items():
            if name in self._values:
                raise FileFault(f"{shortened(name)} is in two files; keep one")
            if value.dtype not in _NAMES or value.is_sparse:
                raise FileFault(f"{path.name}: {shortened(name)} is of {value.dtype}, which is not read here")
            self._values[name] = value.detach()
            self.tensors[name] = StoredTensor(path, _NAMES[value.dtype], tuple(value.shape), 0, value.nbytes)
