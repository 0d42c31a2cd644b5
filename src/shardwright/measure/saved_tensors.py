"""The tensors that autograd keeps between forward and backward, measured: the storages of saved tensors, each once.

This is too slow for a run, whose account is a prediction (account/activations.py). It measures what that predicts.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def saved_bytes(forward: Callable[[], object], constants: Iterable[Tensor] = ()) -> int:
    """Bytes that a forward keeps for its backward, without `constants`: parameters, and tables that layers share.

    For a DTensor, the bytes of this rank's part.
    """
    constant_addresses = {_local(tensor).untyped_storage().data_ptr() for tensor in constants}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in constant_addresses:
            storages[storage.data_ptr()] = storage  # kept alive, so that no other storage may take its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(storage.nbytes() for storage in storages.values())
    del output
    return total


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class LiveBytes:
    """While it is entered (on one thread), counts the bytes of saved tensors, without `constants`; `peak` is the
    most."""

    def __init__(self, constants: Iterable[Tensor] = ()) -> None:
        self._apart = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in constants)}
        self._holders: Counter[int] = Counter()  # number of saved tensors in a storage, by the storage's id
        self._sizes: dict[int, int] = {}
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

    def num_bytes(self, without: Collection[int]) -> int:
        """Bytes of the storages that are held now, except those whose `id` is in `without`."""
        return sum(self._sizes[number] for number in self._holders if number not in without)

    def begin(self, storage: torch.UntypedStorage) -> None:
        """Count a saved tensor that lies in this storage."""
        number = id(storage)
        self._holders[number] += 1
        if self._holders[number] == 1:
            self._sizes[number] = 0 if number in self._apart else storage.nbytes()
            self.now += self._sizes[number]
            self.peak = max(self.peak, self.now)

    def end(self, storage: torch.UntypedStorage) -> None:
        """Count a saved tensor less in this storage."""
        number = id(storage)
        self._holders[number] -= 1
        if not self._holders[number]:
            del self._holders[number]
            self.now -= self._sizes.pop(number)


class _Held:
    """A saved tensor; autograd drops this object when it no longer needs the tensor."""

    def __init__(self, tensor: Tensor, account: LiveBytes) -> None:
        self.tensor, self._account = tensor, account
        account.begin(tensor.untyped_storage())

    def __del__(self) -> None:
        self._account.end(self.tensor.untyped_storage())
