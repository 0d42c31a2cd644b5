"""Gradients in 16 bits on the wire, summed in 32.

The 16-bit all-reduce of Gloo and NCCL rounds at every rank that a partial sum passes. Here each rank receives its share
of every rank's gradient, sums it in float32 and rounds once: a reduce-scatter and an all-gather with the same bytes,
whose error does not grow with the number of ranks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.collectives import Pending
from shardwright.parallel.compress.compressor import Method
from shardwright.parallel.compress.wire import Wire, pack, unpack

# Shapes: d ranks of the axis, C elements of a rank's share.


class Cast(Method):
    """Sums in a 16-bit number type on the wire. It keeps no state.

    A sum too large for float16 becomes infinite and stays infinite, so that a loss scaler sees it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """All-to-all of shares, then all-gather of their sums."""
        d = wire.axis.size
        share = -(-sum(tensor.numel() for tensor in tensors) // d)
        cast_dC = pack(tensors, self._dtype, d * share).view(d, share)
        received_dC = torch.empty_like(cast_dC)
        yield wire.all_to_all(received_dC, cast_dC)
        sum_C = received_dC.sum(0, dtype=torch.float32).to(self._dtype)
        yield wire.all_gather(cast_dC.view(-1), sum_C)
        unpack(cast_dC.view(-1), tensors)

    def scatter_over(self, flat: Tensor, tensors: list[Tensor], out: Tensor, wire: Wire) -> Iterator[Pending]:
        """All-to-all of shares. The sum itself is not rounded."""
        cast_dC = flat.to(self._dtype, copy=True).view(wire.axis.size, -1)
        received_dC = torch.empty_like(cast_dC)
        yield wire.all_to_all(received_dC, cast_dC)
        out.copy_(received_dC.sum(0, dtype=torch.float32))


def bf16(plan: PlanSpec) -> Cast:
    """The method that sends gradients in bfloat16."""
    return Cast(torch.bfloat16)


def fp16(plan: PlanSpec) -> Cast:
    """The method that sends gradients in float16."""
    return Cast(torch.float16)
