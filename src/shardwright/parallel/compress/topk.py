"""Top-k: only the largest elements are sent, each with its index; the others stay in the error until they are large.

Aji and Heafield 2017 (arXiv 1704.05021); Stich et al. 2018 (arXiv 1809.07599, algorithm 1) prove that it converges.
Ranks choose different elements, so the messages are gathered, and traffic grows with the number of ranks: at a share s
of the elements it is s x d times that of an uncompressed all-reduce over d ranks.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.collectives import Pending
from shardwright.parallel.compress.bucket import Bucket, ErrorFeedback, ErrorKind, ErrorSpan, error_spans
from shardwright.parallel.compress.compressor import Method
from shardwright.parallel.compress.wire import Wire, pack, unpack

# Shapes: d ranks of the axis, K elements that a rank sends.


class TopK(Method):
    """Sums the elements of a bucket that are largest on each rank: a share of all elements, at least one. It always
    sums whole buckets, since the largest elements may be in any rank's share."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._error = ErrorFeedback()

    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """All-gather of indices and values, summed in the order of the ranks."""
        corrected = pack(tensors, torch.float32)
        assert corrected.numel() < 2**31, "an index has 32 bits"
        self._error.add_to(corrected)
        count = max(1, math.ceil(self._share * corrected.numel()))
        index_K = corrected.abs().topk(count, sorted=False).indices
        message_2K = torch.stack([index_K.to(torch.int32), corrected[index_K].view(torch.int32)])
        corrected[index_K] = 0.0
        self._error.keep(corrected)

        received_d2K = message_2K.new_empty(wire.axis.size, 2, count)
        yield wire.all_gather(received_d2K.view(-1, count), message_2K)
        total = torch.zeros_like(corrected)
        for rank_message_2K in received_d2K:  # in the order of ranks, so that all ranks round alike
            total.index_add_(0, rank_message_2K[0], rank_message_2K[1].view(torch.float32))
        unpack(total, tensors)

    def state_tensors(self) -> list[Tensor]:
        """The error."""
        return self._error.state_tensors()

    def error_kinds(self, is_scattered: bool) -> tuple[ErrorKind, ...]:
        """Only the error of the gradients."""
        return ("lost",)

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The part of the gradients that was not sent yet."""
        lost = self._error.lost_or_zeros((bucket.num_elements,), device)
        yield from error_spans("lost", bucket.packed(), 0, lost)


def of_plan(plan: PlanSpec) -> TopK:
    """The method of a plan."""
    return TopK(plan.compress_share)
