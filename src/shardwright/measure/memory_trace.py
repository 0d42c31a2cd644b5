"""The memory that the operators of this process allocate, followed operator by operator: its size, and its peak.

Every operator of torch, forward and backward, passes through a dispatch mode, and the storages of its results are
counted until nobody holds them. This works for tensors without memory (the device meta), which a dry run has.

The mode is torch.utils._python_dispatch.TorchDispatchMode. torch documents it as the way to see every operator and has
kept it for years, but has no public name for it. Of this package, only measurements use it.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
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
    """While it is entered, follows the storages that operators make on this thread.

    `now_bytes` are the bytes in storages now, and `peak_bytes` the most since `begin`. Both leave out the bytes that
    `apart_bytes` returns: memory of the host, which a dry run has no other place for.
    """

    def __init__(self, apart_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._apart_bytes = apart_bytes
        self._results = MetaResults()
        self._live: dict[int, int] = {}
        self._all_bytes = 0
        self._observer: Callable[[], None] | None = None
        self._running: Any = None
        self.origins: dict[int, Origin] = {}  # of storages that were made while there was an observer
        self.num_operators = 0
        self.peak_bytes = 0

    @property
    def now_bytes(self) -> int:
        """The bytes allocated now."""
        return self._all_bytes - self._apart_bytes()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Follow the storages of tensors that existed before."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage())

    @property
    def live(self) -> dict[int, int]:
        """Bytes of each storage that is alive, by the id of the storage."""
        return dict(self._live)

    def begin(self, observer: Callable[[], None] | None = None) -> None:
        """Count operators and the peak anew; `observer` is called after each operator."""
        self._observer = observer
        self.num_operators, self.peak_bytes = 0, self.now_bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, and follow its results."""
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
        """The operator that runs, and the line of this package that called it."""
        return Origin(str(self._running), line_of_ours())


def line_of_ours(passed_over: Collection[str] = ()) -> str:
    """The line of this package, outside of `measure` and of the files `passed_over`, that called the running code:
    "train/build.py:12"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        path = name[len(_SOURCE) + 1 :]
        if name.startswith(_SOURCE) and not name.startswith(_HERE) and path not in passed_over:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
