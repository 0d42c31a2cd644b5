"""PowerSGD: a matrix of gradients travels as the product of two thin ones.

Vogels et al. 2019 (arXiv 1905.13727), algorithm 1, one step of subspace iteration a training step, and algorithm 2,
error feedback. All P of a bucket travel in one all-reduce, then all Q in another. Both are sums, so the result does not
depend on how many ranks share the work.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Pending
from shardwright.parallel.compress.compressor import Method
from shardwright.parallel.compress.error_feedback import ErrorFeedback
from shardwright.parallel.compress.pack import pack, unpack
from shardwright.parallel.compress.wire import Wire

# Shapes: N rows and M columns of a matrix (leading dims are rows), R the rank.


class PowerSGD(Method):
    """Sums matrices at low rank, whole ones, for shares cut through matrices. Keeps what was lost, and Q of the last
    step, from which the next one starts."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._error = ErrorFeedback()
        self._queries: list[Tensor] = []

    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """Algorithm 1 on all matrices at once."""
        corrected = pack(tensors, torch.float32)
        self._error.add_to(corrected)
        parts = corrected.split([tensor.numel() for tensor in tensors])
        matrices_NM = [part.view(-1, tensor.shape[-1]) for part, tensor in zip(parts, tensors, strict=True)]
        if not self._queries:
            self._queries = [self._first_query(i, m_NM) for i, m_NM in enumerate(matrices_NM)]
        self._check_queries(matrices_NM)

        left_NR = [m_NM @ q_MR.to(m_NM.device) for m_NM, q_MR in zip(matrices_NM, self._queries, strict=True)]
        packed = pack(left_NR, torch.float32)
        yield wire.all_reduce(packed)
        unpack(packed, left_NR)
        left_NR = [torch.linalg.qr(p_NR).Q for p_NR in left_NR]  # the same bits wherever the same bits come in

        right_MR = [m_NM.T @ p_NR for m_NM, p_NR in zip(matrices_NM, left_NR, strict=True)]
        packed = pack(right_MR, torch.float32)
        pending = wire.all_reduce(packed)
        for m_NM, p_NR, q_MR in zip(matrices_NM, left_NR, right_MR, strict=True):
            m_NM.addmm_(p_NR, q_MR.T, alpha=-1.0)  # algorithm 2: minus what this rank's part of the result says
        self._error.keep(corrected)
        yield pending
        unpack(packed, right_MR)

        for tensor, p_NR, q_MR in zip(tensors, left_NR, right_MR, strict=True):
            tensor.copy_((p_NR @ q_MR.T).view(tensor.shape))
        # From a Q of zeros P is zero, whose orthogonal factor is unit vectors: a fresh start after numbers gone wrong.
        self._queries = [q_MR.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for q_MR in right_MR]

    def memory(self) -> list[Tensor]:
        """The error, and Q of each matrix."""
        return [*self._error.memory(), *self._queries]

    def state_dict(self) -> dict[str, Tensor]:
        """ "lost" [sum of N x M], and "query.i" [M, R] of each matrix."""
        state = {f"query.{i}": q_MR.clone() for i, q_MR in enumerate(self._queries)}
        return state if self._error.lost is None else state | {"lost": self._error.lost.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Error and Q."""
        self._error.load(state.get("lost"))
        num_queries = sum(name.startswith("query.") for name in state)
        self._queries = [state[f"query.{i}"].detach().clone() for i in range(num_queries)]

    def _first_query(self, index: int, m_NM: Tensor) -> Tensor:
        """Standard normal, the same on every rank."""
        generator = torch.Generator().manual_seed(index)
        return torch.randn(m_NM.shape[1], self._rank, generator=generator).to(m_NM.device)

    def _check_queries(self, matrices_NM: list[Tensor]) -> None:
        kept = [list(q_MR.shape) for q_MR in self._queries]
        wanted = [[m_NM.shape[1], self._rank] for m_NM in matrices_NM]
        if kept != wanted:
            raise ValueError(
                f"the Q that PowerSGD kept have shapes {kept}, and these matrices need {wanted}: they were saved with "
                "other buckets or another rank; begin without them"
            )
