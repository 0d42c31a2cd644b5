"""What autograd holds over time: live bytes of saved tensors, each storage once, and their peak."""

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor


class LiveBytes:
    """While it lasts (on one thread), counts bytes that saved tensors hold, `constants` apart; `peak` is the most."""

    def __init__(self, constants: Iterable[Tensor]) -> None:
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in constants}
        self._holders: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self.now = 0
        self.peak = 0

    def __enter__(self) -> "LiveBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> "_Held":
        return _Held(tensor, self)

    def begin(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        holders = self._holders.get(storage.data_ptr(), 0)
        self._holders[storage.data_ptr()] = holders + 1
        if holders == 0 and storage.data_ptr() not in self._apart:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def end(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._holders[storage.data_ptr()] -= 1
        if self._holders[storage.data_ptr()] == 0:
            del self._holders[storage.data_ptr()]
            if storage.data_ptr() not in self._apart:
                self.now -= storage.nbytes()


class _Held:
    """A saved tensor; autograd drops this when it no longer needs the tensor."""

    def __init__(self, tensor: Tensor, account: LiveBytes) -> None:
        self.tensor, self._account = tensor, account
        account.begin(tensor)

    def __del__(self) -> None:
        self._account.end(self.tensor)
