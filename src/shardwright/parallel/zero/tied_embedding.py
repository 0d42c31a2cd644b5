"""A tied embedding: one tensor that the first stage looks tokens up in and the last stage multiplies with.

Where both are on one rank they share their memory; where not, each end of the pipeline holds a copy. Either way each
use has a gradient of its own, and the sum of the two is what the optimizer sees: the same sum, bit for bit, wherever
the two are. Both copies are then updated alike.
"""

from dataclasses import dataclass

import torch

from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit


@dataclass(frozen=True)
class TiedEmbedding:
    """What this rank holds of a tied tensor: its use as a table, its use as the head, both or neither."""

    table: PlacedParameter | None
    head: PlacedParameter | None
    ends: Axis

    @property
    def are_both_here(self) -> bool:
        """Whether one memory serves both uses."""
        return self.table is not None and self.head is not None

    def share_memory(self, unit: FlatUnit) -> None:
        """Let the head show the table's memory, which is in this unit; its gradient is its own."""
        assert self.table is not None and self.head is not None
        unit.follow(self.head, self.table)
        self.head.gradient = torch.zeros(self.head.shape, dtype=unit.sharding.gradients, device=unit.value_shard.device)

    def sum_gradients(self) -> None:
        """Give each use the gradient of both. Moves one all-reduce of the table, if the uses are on two ranks."""
        if self.table is not None and self.head is not None:
            assert self.table.gradient is not None and self.head.gradient is not None
            self.table.gradient.add_(self.head.gradient)
            self.head.has_gradient = False
        elif (mine := self.table if self.table is not None else self.head) is not None:
            assert mine.gradient is not None
            all_reduce(mine.gradient.view(-1), self.ends)
