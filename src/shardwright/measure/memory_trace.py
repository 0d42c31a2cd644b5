"""The memory that the operators of this process allocate, followed one by one: how much is there, and when most.

Every operator of torch passes by a dispatch mode, forward and backward, and what it gives lies in storages that are
counted until nobody holds them. That works for tensors without memory (the device meta), which a dry run has.

The mode is torch.utils._python_dispatch.TorchDispatchMode. torch documents it as the way to see every operator and has
kept it for years, but has no public name for it; it is used here and nowhere else.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright
from shardwright.measure.meta_results import MetaResults

Storage = torch.UntypedStorage
_SOURCE, _HERE = str(Path(shardwright.__file__).parent), str(Path(__file__).parent)


class Origin(NamedTuple):
    """The origin of a storage: an operator of torch, and the line of ours that called it."""

    operator: str
    line: str


class MemoryTrace(TorchDispatchMode):
    """While it lasts, follows the storages that operators make on this thread.

    `now_bytes` is in storages, and `peak_bytes` the most since `begin`. What `apart_bytes` says is not counted: memory
    of the host, which a dry run has no other place for.
    """

    def __init__(self, apart_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._apart_bytes = apart_bytes
        self._results = MetaResults()
        self._live: dict[int, int] = {}
        self._all_bytes = 0
        self._observer: Callable[[], None] | None = None
        self._running: Any = None
        self.origins: dict[int, Origin] = {}  # of storages that were made while somebody observed
        self.num_operators = 0
        self.peak_bytes = 0

    @property
    def now_bytes(self) -> int:
        """The bytes allocated now."""
        return self._all_bytes - self._apart_bytes()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Follow the storages of tensors that were there before."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage())

    @property
    def live(self) -> dict[int, int]:
        """Bytes of each storage that is there, by the number that stands for it."""
        return dict(self._live)

    def begin(self, observer: Callable[[], None] | None = None) -> None:
        """Count operators and the peak anew; `observer` is called after each operator."""
        self._observer = observer
        self.num_operators, self.peak_bytes = 0, self.now_bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        self._running = func
        result = self._results.call(func, args, kwargs or {})
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
            elif isinstance(leaf, tuple | list):
                self.add(part for part in tree_leaves(leaf) if isinstance(part, Tensor))
        self.num_operators += 1
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        if self._observer is not None:
            self._observer()
        return result

    def _follow(self, storage: Storage) -> None:
        number, num_bytes = id(storage), storage.nbytes()
        if number not in self._live:
            self._live[number] = num_bytes
            self._all_bytes += num_bytes
            if self._observer is not None:
                self.origins[number] = self.origin()
            weakref.finalize(storage, self._forget, number).atexit = False

    def _forget(self, number: int) -> None:
        self._all_bytes -= self._live.pop(number)
        self.origins.pop(number, None)

    def origin(self) -> Origin:
        """The operator that runs, and the line of ours that called it."""
        return Origin(str(self._running), line_of_ours())


def line_of_ours() -> str:
    """The line of this package, outside of its measuring, that called what runs: "train/build.py:12"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCE) and not name.startswith(_HERE):
            return f"{name[len(_SOURCE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
