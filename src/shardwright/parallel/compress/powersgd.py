"""PowerSGD: a matrix of gradients is sent as the product of two thin matrices.

Vogels et al. 2019 (arXiv 1905.13727), algorithm 1, with one step of subspace iteration in each training step, and
algorithm 2, error feedback. All P of a bucket are sent in one all-reduce, then all Q in another. Both are sums, so the
result does not depend on the number of ranks.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.collectives import Pending
from shardwright.parallel.compress.bucket import Bucket, ErrorFeedback, ErrorKind, ErrorSpan, error_spans
from shardwright.parallel.compress.compressor import Method
from shardwright.parallel.compress.wire import Wire, pack, unpack

# Shapes: N rows and M columns of a matrix (leading dims are rows), R the rank.


class PowerSGD(Method):
    """Sums matrices at low rank. It always sums whole matrices, since a rank's share may end within a matrix. Keeps the
    error, and Q of the last step, from which the next step starts."""

    has_warm_starts = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._error = ErrorFeedback()
        self._queries: list[Tensor] = []
        self._loaded_queries: list[Tensor | None] = []  # of the run that this one resumes

    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """Algorithm 1 on all matrices at once."""
        corrected = pack(tensors, torch.float32)
        self._error.add_to(corrected)
        parts = corrected.split([tensor.numel() for tensor in tensors])
        matrices_NM = [part.view(-1, tensor.shape[-1]) for part, tensor in zip(parts, tensors, strict=True)]
        if not self._queries:
            self._queries = [self._first_query(i, m_NM) for i, m_NM in enumerate(matrices_NM)]
            self._loaded_queries = []

        left_NR = [m_NM @ q_MR for m_NM, q_MR in zip(matrices_NM, self._queries, strict=True)]
        packed = pack(left_NR, torch.float32)
        yield wire.all_reduce(packed)
        unpack(packed, left_NR)
        left_NR = [torch.linalg.qr(p_NR).Q for p_NR in left_NR]  # equal bits on all ranks, from equal bits

        right_MR = [m_NM.T @ p_NR for m_NM, p_NR in zip(matrices_NM, left_NR, strict=True)]
        packed = pack(right_MR, torch.float32)
        pending = wire.all_reduce(packed)
        for m_NM, p_NR, q_MR in zip(matrices_NM, left_NR, right_MR, strict=True):
            m_NM.addmm_(p_NR, q_MR.T, alpha=-1.0)  # algorithm 2: the error is what the result lacks
        self._error.keep(corrected)
        yield pending
        unpack(packed, right_MR)

        for tensor, p_NR, q_MR in zip(tensors, left_NR, right_MR, strict=True):
            tensor.copy_((p_NR @ q_MR.T).view(tensor.shape))
        # A Q of zeros gives a P of zeros, whose orthogonal factor is unit vectors: a new start after values that were
        # not finite.
        self._queries = [q_MR.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for q_MR in right_MR]

    def state_tensors(self) -> list[Tensor]:
        """The error, and Q of each matrix."""
        return [*self._error.state_tensors(), *self._queries]

    def error_kinds(self, is_scattered: bool) -> tuple[ErrorKind, ...]:
        """Only the error of the gradients."""
        return ("lost",)

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The part of the gradients beyond the low rank."""
        lost = self._error.lost_or_zeros((bucket.num_elements,), device)
        yield from error_spans("lost", bucket.packed(), 0, lost)

    def warm_starts(self) -> Sequence[Tensor | None]:
        """Q of each matrix, [M, R]."""
        return self._queries or self._loaded_queries

    def start_from(self, starts: list[Tensor | None]) -> None:
        """Continue from these Q. A Q with another compression rank is ignored."""
        self._queries = []
        self._loaded_queries = starts

    def _first_query(self, index: int, m_NM: Tensor) -> Tensor:
        """The first Q of a matrix: from the resumed run, or standard normal; the same on every rank."""
        loaded_MR = self._loaded_queries[index] if self._loaded_queries else None
        if loaded_MR is not None and loaded_MR.shape == (m_NM.shape[1], self._rank):
            return loaded_MR
        generator = torch.Generator().manual_seed(index)
        return torch.randn(m_NM.shape[1], self._rank, generator=generator).to(m_NM.device)


def of_plan(plan: PlanSpec) -> PowerSGD:
    """The method of a plan."""
    return PowerSGD(plan.compress_rank)
