"""The collectives of one compressed reduction, with an account of what they put on the wire.

Bytes on the wire are those that all ranks of the axis send together, in algorithms that waste nothing (a ring, say):
each of the d ranks sends (d - 1) / d of the bytes of a gathered or exchanged tensor, and of a reduced one twice that
(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). The sum over the ranks is a whole number.
"""

from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, Pending, start_all_gather, start_all_reduce, start_all_to_all


class Wire:
    """Starts collectives on an axis. `num_bytes` is what they put on the wire so far."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.num_bytes = 0

    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` in place."""
        self.num_bytes += 2 * num_bytes_passed_on(x, self.axis)
        return start_all_reduce(x, self.axis)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """Concatenate each rank's `x` into `out`. Shapes [n, ...] and [n * size, ...]."""
        self.num_bytes += num_bytes_passed_on(out, self.axis)
        return start_all_gather(out, x, self.axis)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """Exchange shares of dim 0. Both [n * size, ...]."""
        self.num_bytes += num_bytes_passed_on(x, self.axis)
        return start_all_to_all(out, x, self.axis)


def num_bytes_passed_on(x: Tensor, axis: Axis) -> int:
    """What all ranks together send where each part of `x` must reach every rank but the one that has it."""
    return (axis.size - 1) * x.numel() * x.element_size()
