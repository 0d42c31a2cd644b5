"""Bytes that autograd keeps for the backward, counted while they are kept. Too slow for runs; for tests."""

from typing import Any

import torch
from torch import Tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """While this lasts, counts the memory of saved tensors: each storage once, those of `others` never."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__(self._pack, lambda kept: kept.tensor)
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._uses: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __enter__(self) -> "SavedBytes":
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Any:
        return _Kept(tensor.detach(), self)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._others:
            return
        self._uses[address] = self._uses.get(address, 0) + 1
        if self._uses[address] == 1:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def remove(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._others:
            return
        self._uses[address] -= 1
        if not self._uses[address]:
            self.now -= storage.nbytes()


class _Kept:
    """A saved tensor, as long as the graph has it."""

    def __init__(self, tensor: Tensor, account: SavedBytes) -> None:
        self.tensor, self._account = tensor, account
        account.add(tensor)

    def __del__(self) -> None:
        self._account.remove(self.tensor)
