"""Documents that share a sequence: who sees whom, and whose loss counts.

Where one document ends and the next begins is marked in the tokens themselves: one that begins a document is given as
-1 - id, and one of which no loss is taken, such as what a user says in a chat, as id + UNCOUNTED. So marks go with the
tokens to every stage and every part of a sequence, and no plan can lose them. Tokens that only fill a sample up are
marked too: they are no part of what is trained on, and layers with experts leave them out.

Shape suffixes: S sequence, B batch, T = S + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.sharding.token_marks import FILLING, UNCOUNTED


@dataclass(frozen=True)
class CountedShares:
    """Shares of all positions of a global batch: those whose next token has a loss, those with a token that has one at
    each distance further, and those whose own token is real, that is no filling."""

    targets: tuple[float, ...]
    real: float = 1.0


def without_marks(tokens_BS: Tensor) -> Tensor:
    """The ids themselves: a new tensor."""
    return _unsigned(tokens_BS).bitwise_and_(UNCOUNTED - 1)


def is_real(tokens_BS: Tensor) -> Tensor:
    """True if each token belongs to a document, and does not only fill a sample up."""
    return _unsigned(tokens_BS).bitwise_and_(FILLING) == 0


def _unsigned(tokens_BS: Tensor) -> Tensor:
    return torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS)


def document_numbers(tokens_BS: Tensor) -> Tensor:
    """The number of the document that each token is in, counted in its sample, int32."""
    return (tokens_BS < 0).cumsum(dim=1, dtype=torch.int32)


def document_positions(tokens_BS: Tensor) -> Tensor:
    """The position of each token in its document, or in the sample where its document began before that, int64."""
    places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    begins_BS = torch.where(tokens_BS < 0, places_S, 0).cummax(dim=1).values
    return places_S - begins_BS


def chunk_numbers(positions_BS: Tensor, size: int) -> Tensor:
    """The number of the chunk that each token is in, counted in its sample, int32: documents are cut into chunks of
    `size` positions, each from its own beginning on."""
    return (positions_BS % size == 0).cumsum(dim=1, dtype=torch.int32)


def counts(tokens_BT: Tensor, distance: int) -> Tensor:
    """True if the token so much further counts, of each position that has one: it is in the same document, and not
    marked as one without a loss. [B, T - distance].

    The first token of a document has nothing before it that it could be told from.
    """
    # Of a token that begins a document the bit says nothing, and it never follows.
    return follows(tokens_BT, distance).logical_and_((tokens_BT[:, distance:] & UNCOUNTED) == 0)


def follows(tokens_BT: Tensor, distance: int) -> Tensor:
    """True if the token so much further is in the same document, of each position that has one, [B, T - distance]."""
    documents_BT = document_numbers(tokens_BT)
    return documents_BT[:, distance:] == documents_BT[:, :-distance]


def shares_that_count(tokens_BT: Tensor, replicas: Axis, num_further: int, with_real: bool = False) -> CountedShares:
    """The shares over the samples of all replicas, that of real tokens if it is asked for. One all-reduce of these
    numbers.

    Losses of targets that do not count are 0. Means over all positions, divided by this, are means over those that
    count, however those lie over ranks and microbatches. It is 0 if none counts.
    """
    numbers = [counts(tokens_BT, distance + 1).sum() for distance in range(1 + num_further)]
    if with_real:
        numbers.append(is_real(tokens_BT[:, :-1]).sum())
    totals = all_reduce(torch.stack(numbers), replicas)
    num_positions = tokens_BT[:, 1:].numel() * replicas.size
    counted = replicas.numbers_or(totals, [num_positions] * len(numbers))
    shares = [count / num_positions for count in counted]
    return CountedShares(tuple(shares[: 1 + num_further]), *(share or 1.0 for share in shares[1 + num_further :]))
