"""What autograd keeps: bytes of the storages that saved tensors lie in, each counted once."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], object], constants: Iterable[Tensor] = ()) -> int:
    """Bytes that a forward keeps for its backward, without `constants`: parameters, and tables that layers share."""
    apart = {tensor.untyped_storage().data_ptr() for tensor in constants}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage  # kept alive, so that no other may take its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(storage.nbytes() for storage in kept.values())
    del output
    return total
