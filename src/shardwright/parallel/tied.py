"""A tied embedding: one tensor that the first stage looks tokens up in and the last stage multiplies with.

Where both are on one rank they share their memory; where not, each end of the pipeline holds a copy. Either way each
use has a gradient of its own, and the sum of the two is what the optimizer sees. Both copies are then updated alike.
"""

from shardwright.parallel.collectives import Axis, all_reduce
from shardwright.parallel.parameter import PlacedParameter


def sum_tied_gradients(table: PlacedParameter | None, head: PlacedParameter | None, ends: Axis) -> None:
    """Make the gradient of the tied tensor that of both its uses. Arguments are what this rank holds, or None.

    Moves one all-reduce of the table over the two ends of the pipeline.
    """
    if table is not None and head is not None:
        assert table.grad is not None and head.grad is not None
        table.grad.add_(head.grad)
        return
    mine = table if table is not None else head
    if mine is not None:
        assert mine.grad is not None
        all_reduce(mine.grad.view(-1), ends)
