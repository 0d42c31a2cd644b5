"""Documents that share a sequence: who sees whom, and whose loss counts.

Where one document ends and the next begins is marked in the tokens themselves: one that begins a document is given as
-1 - id. So marks go with the tokens to every stage and every part of a sequence, and no plan can lose them.

Shape suffixes: S sequence, B batch.
"""

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_reduce


def without_marks(tokens_BS: Tensor) -> Tensor:
    """The ids themselves: a new tensor."""
    return torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS)


def document_numbers(tokens_BS: Tensor) -> Tensor:
    """The number of the document that each token is in, counted in its sample, int32."""
    return (tokens_BS < 0).cumsum(dim=1, dtype=torch.int32)


def counts(documents_BS: Tensor) -> Tensor:
    """Whether the loss of each target counts, [B, S] of the numbers of S + 1 tokens.

    The first token of a document has nothing before it that it could be told from.
    """
    return documents_BS[:, 1:] == documents_BS[:, :-1]


def share_that_counts(tokens_BS: Tensor, replicas: Axis) -> float:
    """Which share of all targets counts, over the samples of all replicas. One all-reduce of a number.

    Losses of targets that do not count are 0. Means over all targets, divided by this, are means over those that do,
    however those lie over ranks and microbatches. If none counts it is 1.
    """
    targets_BS = tokens_BS[:, 1:]
    total = all_reduce((targets_BS >= 0).sum(), replicas)
    counted = 0 if total.is_meta else int(total)  # in a dry run nothing has a value
    return counted / (targets_BS.numel() * replicas.size) if counted else 1.0
