"""Token and position embeddings. The table's rows are split over tp (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Each rank looks up the tokens whose rows it holds, and has zeros for the others; the sum over tp is the embedding.

The tensors that its backward keeps are listed in memory/activations.py; their sizes are in memory/kept_tensors.py
(InnerEnds).

Shape suffixes: S sequence of this rank, B batch, H hidden; s is S / tp under sequence parallel.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.config.model import ModelSpec
from shardwright.config.plan import split_evenly
from shardwright.parallel.comm.regions import reduce_from, scatter_to
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded, whole


class Embedding(nn.Module):
    """Vocabulary-parallel lookup."""

    def __init__(self, spec: ModelSpec, sharding: LayerSharding) -> None:
        super().__init__()
        self.sharding, self.vocab, self.scale = sharding, spec.vocab, spec.embedding_scale
        self.weight = sharded((spec.vocab, spec.hidden), 0, sharding.tp, "normal", std=spec.init_std)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """[S, B] to [s, B, H]."""
        return look_up(tokens_SB, self.weight, self.vocab, self.sharding, scale=self.scale)


def look_up(
    tokens_SB: Tensor, weight: PlacedParameter, vocab: int, sharding: LayerSharding, scale: float = 1.0
) -> Tensor:
    """The rows of the tokens in a table of `vocab` rows, sharded over tp, times `scale`: [S, B] to [s, B, H]."""
    x_sBH = _rows(tokens_SB, weight, vocab, sharding)
    return x_sBH if scale == 1.0 else x_sBH * scale


def _rows(tokens_SB: Tensor, weight: PlacedParameter, vocab: int, sharding: LayerSharding) -> Tensor:
    if sharding.tp.size == 1:
        return _Lookup.apply(tokens_SB, weight, sharding.tp.kind)
    first_row, end_row = split_evenly(vocab, sharding.tp.size, sharding.tp.index)
    rows_SB = tokens_SB - first_row
    elsewhere_SB = (tokens_SB < first_row) | (tokens_SB >= end_row)
    x_SBH = _Lookup.apply(rows_SB.masked_fill(elsewhere_SB, 0), weight, sharding.tp.kind)
    x_SBH = x_SBH.masked_fill(elsewhere_SB[..., None], 0.0)
    leave = scatter_to if sharding.shards_sequence else reduce_from
    return leave(x_SBH, sharding.tp)


class _Lookup(torch.autograd.Function):
    """Rows of a table. Neither forward nor backward communicates; the backward needs the row numbers, not the table."""

    @staticmethod
    def forward(ctx: Any, rows_SB: Tensor, weight: PlacedParameter, kind: str) -> Tensor:
        ctx.save_for_backward(rows_SB)
        ctx.weight, ctx.kind = weight, kind
        return functional.embedding(rows_SB, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (rows_SB,) = ctx.saved_tensors
        ctx.weight.add_rows(rows_SB.flatten(), grads[0].flatten(0, 1), kind=ctx.kind)
        return None, None, None


class LearnedPositions(nn.Module):
    """A trained vector for each position (Radford et al. 2019). Under sequence parallel a rank adds its own part.

    The table may have unused rows before the row of the first position (OPT, arXiv 2205.01068).
    """

    def __init__(self, spec: ModelSpec, sharding: LayerSharding) -> None:
        super().__init__()
        self.sharded_over, self._kind = sharding.summed_over, sharding.tp.kind
        self.offset = spec.position_offset
        shape = (self.offset + spec.sequence, spec.hidden)
        self.weight = whole(shape, "normal", spec.init_std, summed_over=self.sharded_over)

    def forward(self, x_sBH: Tensor, positions_SB: Tensor) -> Tensor:
        """Add the vectors of the positions, [S, B], or [S, 1] if all samples have the same positions."""
        positions_SB = positions_SB + self.offset if self.offset else positions_SB
        if self.sharded_over is not None:
            positions_SB = torch.chunk(positions_SB, self.sharded_over.size)[self.sharded_over.index]
        # Many documents begin at one position: the sum of its gradients must be exact, as for a token.
        if self._kind == "cuda":
            return x_sBH + _Lookup.apply(positions_SB, self.weight, self._kind)
        return x_sBH + self.weight[positions_SB]
