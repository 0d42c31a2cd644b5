"""A table of embeddings with two uses: the first stage looks up tokens in it, and the last stage uses it as a tied
head, or to look up further tokens if it predicts several.

If both uses are on one rank they share memory; else each end of the pipeline holds a copy. Either way each use has a
gradient of its own, and the optimizer sees the sum of both: the same sum, bit for bit, wherever the two uses are. So
both copies are updated alike.
"""

from dataclasses import dataclass

import torch

from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit


@dataclass(frozen=True)
class TiedEmbedding:
    """The uses of the table on this rank: `table` on the first stage, `last` on the last, both or neither."""

    table: PlacedParameter | None
    last: PlacedParameter | None
    ends: Axis

    @property
    def are_both_here(self) -> bool:
        """True if one memory serves both uses."""
        return self.table is not None and self.last is not None

    def share_memory(self, unit: FlatUnit) -> None:
        """Let the last stage's parameter share the table's memory, which is in this unit; its gradient is separate."""
        assert self.table is not None and self.last is not None
        unit.follow(self.last, self.table)
        if unit.is_frozen:
            return
        self.last.gradient = torch.zeros(self.last.shape, dtype=unit.sharding.gradients, device=unit.value_shard.device)

    def sum_gradients(self) -> None:
        """Sum the gradients of both uses. Moves one all-reduce of the table if the uses are on two ranks."""
        if any(use is not None and use.place.is_frozen for use in (self.table, self.last)):
            return
        if self.table is not None and self.last is not None:
            assert self.table.gradient is not None and self.last.gradient is not None
            self.table.gradient.add_(self.last.gradient)
            self.last.has_gradient = False
        elif (table_copy := self.table if self.table is not None else self.last) is not None:
            assert table_copy.gradient is not None
            all_reduce(table_copy.gradient.view(-1), self.ends)
