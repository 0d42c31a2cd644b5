"""Tensors side by side in one vector, and the collectives of one compressed reduction, with an account of their bytes.

Bytes on the wire are those that all ranks of the axis send together (sharding/compression.py).
"""

import torch
from torch import Tensor

from shardwright.config.compression_facts import BucketCollective
from shardwright.parallel.comm.collectives import Axis, Pending, start_all_gather, start_all_reduce, start_all_to_all
from shardwright.sharding.compression import wire_bytes


def pack(tensors: list[Tensor], dtype: torch.dtype, num_elements: int = 0) -> Tensor:
    """A vector of all elements, in number type `dtype`, padded with zeros to `num_elements`."""
    filled = sum(tensor.numel() for tensor in tensors)
    packed = tensors[0].new_empty(max(filled, num_elements), dtype=dtype)
    offset = 0
    for tensor in tensors:
        packed[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        offset += tensor.numel()
    packed[filled:].zero_()
    return packed


def unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    """Overwrite the tensors with the elements of the vector."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(packed[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()


class Wire:
    """Starts collectives on an axis. `num_bytes` is their bytes on the wire so far."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.num_bytes = 0

    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` in place."""
        self.num_bytes += sent_bytes("all_reduce", x, self.axis)
        return start_all_reduce(x, self.axis)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """Concatenate each rank's `x` into `out`. Shapes [n, ...] and [n * size, ...]."""
        self.num_bytes += sent_bytes("all_gather", out, self.axis)
        return start_all_gather(out, x, self.axis)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """Exchange shares of dim 0. Both [n * size, ...]."""
        self.num_bytes += sent_bytes("all_to_all", x, self.axis)
        return start_all_to_all(out, x, self.axis)


def sent_bytes(kind: str, x: Tensor, axis: Axis) -> int:
    """The bytes that all ranks together send in a collective whose full tensor is `x`."""
    return int(wire_bytes((BucketCollective(kind, x.numel() * x.element_size()),), axis.size))
