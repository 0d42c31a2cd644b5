"""Documents that share a sequence: which tokens see each other, and which tokens have a loss.

The tokens themselves are marked: the first token of a document is stored as -1 - id, and a token without a loss, such
as one of a user's message in a chat, as id + UNCOUNTED. So marks go with the tokens to every stage and every part of a
sequence, and no plan can lose them. Padding tokens of a sample are marked too: they are not trained on, and layers with
experts leave them out.

Shape suffixes: S sequence, B batch, T = S + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_reduce
from shardwright.sharding.token_marks import FILLING, UNCOUNTED


@dataclass(frozen=True)
class CountedShares:
    """Shares of the positions of a global batch. `targets` is the share of positions whose next token has a loss, and
    the same for the token at each further distance; `real` is the share of positions whose own token is no padding."""

    targets: tuple[float, ...]
    real: float = 1.0


def without_marks(tokens_BS: Tensor) -> Tensor:
    """The ids of the tokens without marks, in a new tensor."""
    return _unsigned(tokens_BS).bitwise_and_(UNCOUNTED - 1)


def is_real(tokens_BS: Tensor) -> Tensor:
    """For each token, True if it belongs to a document, False if it is padding."""
    return _unsigned(tokens_BS).bitwise_and_(FILLING) == 0


def _unsigned(tokens_BS: Tensor) -> Tensor:
    return torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS)


def document_numbers(tokens_BS: Tensor) -> Tensor:
    """The number of each token's document, counted within its sample, int32."""
    return (tokens_BS < 0).cumsum(dim=1, dtype=torch.int32)


def document_positions(tokens_BS: Tensor) -> Tensor:
    """The position of each token in its document, int64; if the document began before the sample, in the sample."""
    places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    begins_BS = torch.where(tokens_BS < 0, places_S, 0).cummax(dim=1).values
    return places_S - begins_BS


def chunk_numbers(positions_BS: Tensor, size: int) -> Tensor:
    """The number of each token's chunk, counted within its sample, int32. Each document is split into chunks of `size`
    positions, from its first token on."""
    return (positions_BS % size == 0).cumsum(dim=1, dtype=torch.int32)


def has_target(tokens_BT: Tensor, distance: int) -> Tensor:
    """For each position, True if the token at `distance` after it has a loss: it is in the same document, and not
    marked as one without a loss. [B, T - distance].

    The first token of a document has no loss, since no token before it can predict it.
    """
    # The bit is meaningless for the first token of a document, which `follows` excludes.
    return follows(tokens_BT, distance).logical_and_((tokens_BT[:, distance:] & UNCOUNTED) == 0)


def follows(tokens_BT: Tensor, distance: int) -> Tensor:
    """For each position, True if the token at `distance` after it is in the same document, [B, T - distance]."""
    documents_BT = document_numbers(tokens_BT)
    return documents_BT[:, distance:] == documents_BT[:, :-distance]


def shares_that_count(tokens_BT: Tensor, replicas: Axis, num_further: int, with_real: bool) -> CountedShares:
    """The shares over the samples of all replicas, with the share of real tokens if `with_real`. Moves one all-reduce
    of these numbers.

    Losses of targets that do not count are 0. A mean over all positions, divided by the share, is a mean over the
    positions that count, however these are distributed over ranks and microbatches. A share is 0 if no position counts.
    """
    numbers = [has_target(tokens_BT, distance + 1).sum() for distance in range(1 + num_further)]
    if with_real:
        numbers.append(is_real(tokens_BT[:, :-1]).sum())
    totals = all_reduce(torch.stack(numbers), replicas)
    num_positions = tokens_BT[:, 1:].numel() * replicas.size
    counted = replicas.numbers_or(totals, [num_positions] * len(numbers))
    shares = [count / num_positions for count in counted]
    return CountedShares(tuple(shares[: 1 + num_further]), *(share or 1.0 for share in shares[1 + num_further :]))
