"""A unit of a user's own module: its gathered values always lie in the same storage.

Our own layers ask for a parameter's values again in the backward. Autograd does not: it may have saved a view of the
storage that the weight had in the forward, such as the transposed weight. So the values are gathered into that storage
again, which has memory only while they are gathered (Zhao et al. 2023, arXiv 2304.11277, section 4.1). A parameter
whose values are not gathered shows NaN, so that a read from outside its own module is noticed.
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
            with torch.inference_mode(False):  # even if the first pass is one of inference, later ones are not
                return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        buffer = OneBuffer(make, lambda memory, num_bytes: memory.untyped_storage().resize_(num_bytes), counting=pool)
        self.borrow_values_from(buffer)

    @property
    def are_values_here(self) -> bool:
        """True if the parameters are views of their values."""
        return self._full_values is not None

    def _show(self) -> None:
        if self._full_values is not None:
            super()._show()
            return
        with torch.inference_mode(False):
            not_a_number = self._not_a_number()
        for parameter in self.parameters:
            parameter.data = not_a_number.expand(parameter.shape)

    def _not_a_number(self) -> Tensor:
        return torch.full((), float("nan"), dtype=self.value_shard.dtype, device=self.parameters[0].device)
