"""Documents that share a sequence: who sees whom, and whose loss counts.

Where one document ends and the next begins is marked in the tokens themselves: one that begins a document is given as
-1 - id, and one of which no loss is taken, such as what a user says in a chat, as id + UNCOUNTED. So marks go with the
tokens to every stage and every part of a sequence, and no plan can lose them.

Shape suffixes: S sequence, B batch, T = S + 1.
"""

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.sharding.token_marks import UNCOUNTED


def without_marks(tokens_BS: Tensor) -> Tensor:
    """The ids themselves: a new tensor."""
    return torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS).bitwise_and_(UNCOUNTED - 1)


def document_numbers(tokens_BS: Tensor) -> Tensor:
    """The number of the document that each token is in, counted in its sample, int32."""
    return (tokens_BS < 0).cumsum(dim=1, dtype=torch.int32)


def counts(tokens_BT: Tensor, distance: int) -> Tensor:
    """Whether the token so much further counts, of each position that has one: it is in the same document, and not
    marked as one without a loss. [B, T - distance].

    The first token of a document has nothing before it that it could be told from.
    """
    documents_BT = document_numbers(tokens_BT)
    follows = documents_BT[:, distance:] == documents_BT[:, :-distance]
    # Of a token that begins a document the bit says nothing, and it never follows.
    return follows.logical_and_((tokens_BT[:, distance:] & UNCOUNTED) == 0)


def shares_that_count(tokens_BT: Tensor, replicas: Axis, num_further: int) -> tuple[float, ...]:
    """Which share of all positions has a next token that counts, over the samples of all replicas, and so which has one
    of each distance further. One all-reduce of these numbers.

    Losses of targets that do not count are 0. Means over all positions, divided by this, are means over those that
    count, however those lie over ranks and microbatches. If none counts it is 1.
    """
    mine = torch.stack([counts(tokens_BT, distance + 1).sum() for distance in range(1 + num_further)])
    totals = all_reduce(mine, replicas)
    counted = [0] * (1 + num_further) if totals.is_meta else totals.tolist()  # in a dry run nothing has a value
    num_positions = tokens_BT[:, 1:].numel() * replicas.size
    return tuple(count / num_positions if count else 1.0 for count in counted)
