"""The tensors that autograd keeps between forward and backward, measured: the storages of saved tensors, each once.

This is too slow for a run, whose account is a prediction (memory/activations.py). It measures what that predicts.
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
    """A context manager that counts the bytes of saved tensors on one thread, without `constants`. `peak_bytes` is the
    maximum.

    Storages are compared by `id`, because in a dry run, on the meta device, all of them have the address 0.
    """

    def __init__(self, constants: Iterable[Tensor] = ()) -> None:
        self._constant_storages = {
            id(storage): storage for storage in (tensor.untyped_storage() for tensor in constants)
        }
        self._num_saved_by_storage: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self.current_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> "LiveBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> "_Held":
        return _Held(tensor, self)

    def current_bytes_except(self, storage_ids: Collection[int]) -> int:
        """Bytes of the storages that are held now, except those with these ids."""
        return sum(
            self._sizes[storage_id] for storage_id in self._num_saved_by_storage if storage_id not in storage_ids
        )

    def begin(self, storage: torch.UntypedStorage) -> None:
        """Count a saved tensor that lies in this storage."""
        storage_id = id(storage)
        self._num_saved_by_storage[storage_id] += 1
        if self._num_saved_by_storage[storage_id] == 1:
            self._sizes[storage_id] = 0 if storage_id in self._constant_storages else storage.nbytes()
            self.current_bytes += self._sizes[storage_id]
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def end(self, storage: torch.UntypedStorage) -> None:
        """Stop counting a saved tensor in this storage."""
        storage_id = id(storage)
        self._num_saved_by_storage[storage_id] -= 1
        if not self._num_saved_by_storage[storage_id]:
            del self._num_saved_by_storage[storage_id]
            self.current_bytes -= self._sizes.pop(storage_id)


class _Held:
    """A saved tensor; autograd drops this object when it no longer needs the tensor."""

    def __init__(self, tensor: Tensor, account: LiveBytes) -> None:
        self.tensor, self._account = tensor, account
        account.begin(tensor.untyped_storage())

    def __del__(self) -> None:
        self._account.end(self.tensor.untyped_storage())
