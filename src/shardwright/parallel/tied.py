"""A tied embedding: one tensor that the first stage looks tokens up in and the last stage multiplies with.

Where both are on one rank they share their memory; where not, each end of the pipeline holds a copy. Either way each
use has a gradient of its own, and the sum of the two is what the optimizer sees: the same sum, bit for bit, wherever
the two are. Both copies are then updated alike.
"""

from dataclasses import dataclass

from shardwright.parallel.collectives import Axis, all_reduce
from shardwright.parallel.parameter import PlacedParameter


@dataclass(frozen=True)
class TiedEmbedding:
    """What this rank holds of a tied tensor: its use as a table, its use as the head, both or neither."""

    table: PlacedParameter | None
    head: PlacedParameter | None
    ends: Axis

    def share_memory(self) -> None:
        """Make both uses one tensor, if both are here."""
        if self.table is not None and self.head is not None:
            self.head.data = self.table.data

    def sum_gradients(self) -> None:
        """Give each use the gradient of both. Moves one all-reduce of the table, if the uses are on two ranks."""
        if self.table is not None and self.head is not None:
            assert self.table.grad is not None and self.head.grad is not None
            self.table.grad.add_(self.head.grad)
        elif (mine := self.table if self.table is not None else self.head) is not None:
            assert mine.grad is not None
            all_reduce(mine.grad.view(-1), self.ends)

    def is_second_use(self, parameter: PlacedParameter) -> bool:
        """Whether this is the head of a tensor whose table is on this rank: the optimizer must not update it again."""
        return parameter is self.head and self.table is not None
