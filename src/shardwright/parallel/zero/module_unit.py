"""A unit of a module that is not ours: its gathered values always lie in one storage.

The layers here ask for a parameter's values again in the backward. Autograd does not: what it has saved of a weight,
transposed say, is a view of the storage that the weight had in the forward. So the values come back to that storage,
which has memory while they are here and none while they are not (Zhao et al. 2023, arXiv 2304.11277, section 4.1).
A parameter whose values are not here shows NaN: whoever reads it, outside of its own module, does not go on unnoticed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit, Sharding
from shardwright.parallel.zero.tensor_pool import TensorPool
from shardwright.sharding.buffer_pool import OneBuffer


class ModuleUnit(FlatUnit):
    """The flat buffers of some parameters of a module."""

    def __init__(
        self, parameters: Sequence[PlacedParameter], sharding: Sharding, pool: TensorPool, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(parameters, sharding, pool, *args, **kwargs)
        device = parameters[0].device

        def make(num_bytes: int) -> Tensor:
            with torch.inference_mode(False):  # where the first pass is one of inference, others are not
                return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        own = OneBuffer(
            make, lambda memory, num_bytes: memory.untyped_storage().resize_(num_bytes), counting=pool,
        )  # fmt: skip
        self.borrow_values_from(own)

    @property
    def are_values_here(self) -> bool:
        """True if the parameters show their values."""
        return self._shown is not None

    def _show(self) -> None:
        if self._shown is not None:
            super()._show()
            return
        with torch.inference_mode(False):
            nothing = self._nothing()
        for parameter in self.parameters:
            parameter.data = nothing.expand(parameter.shape)

    def _nothing(self) -> Tensor:
        return torch.full((), float("nan"), dtype=self.value_shard.dtype, device=self.parameters[0].device)
