"""Output head and cross entropy over a vocabulary that is split over tp, chunk by chunk of tokens.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3): three numbers a token cross the ranks (largest logit, logit of the
target, sum of exponentials) in place of a vocabulary of them.

No rank holds the logits of more tokens than a chunk's (sharding/loss_chunks.py). A chunk's gradients are made while its
logits are there, so that these are computed once, and all of that happens in the backward: the forward keeps the hidden
states and nothing else, however many microbatches are in flight.

Shape suffixes: s positions between the layers, of this rank (under sequence parallel 1 / tp of those within), B batch,
H hidden, T tokens, of a microbatch or of a chunk, V = rows of the vocabulary on this rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.model.fused_softmax import exponential_sums, softmax_gradient
from shardwright.model.logit_change import LogitChange
from shardwright.parallel.comm.collectives import (
    Axis,
    Pending,
    all_reduce,
    all_reduce_max,
    start_all_reduce,
    start_reduce_scatter,
)
from shardwright.parallel.tensor.linear import LayerSharding, start_gather_again
from shardwright.parallel.tensor.parameter import PlacedParameter

_AS_THEY_ARE = LogitChange()


@dataclass(frozen=True)
class Targets:
    """The targets of a microbatch's tokens, position by position: rows [T] of the vocabulary, counted from this rank's
    first, and the mask of tokens without a loss, if there are any. A chunk is so many `positions` of s. The loss
    `completes` the head's gradient if its backward is the last that adds to it."""

    rows_T: Tensor
    skipped_T: Tensor | None
    positions: int
    completes: bool = True


def microbatch_loss(
    x_sBH: Tensor, weight_VH: PlacedParameter, targets: Targets, sharding: LayerSharding, into: Tensor | None = None,
    logits: LogitChange = _AS_THEY_ARE,
) -> Tensor:  # fmt: skip
    """The mean cross entropy of this rank's tokens, a float32 number; a target without a loss counts as 0. `logits`
    says what is done to logits first.

    With gradients the number is 0 until the backward has run, which writes it, `into` this memory if some is given.
    """
    if torch.is_grad_enabled():
        into = torch.zeros((), device=x_sBH.device) if into is None else into
        return _HeadLoss.apply(x_sBH, weight_VH, (targets, into, logits), sharding)
    total = torch.zeros((), device=x_sBH.device)
    for chunk in _chunks(x_sBH, targets, sharding):
        total += _Softmax.of(chunk, weight_VH, sharding.tp, logits).loss
    return total.div_(len(targets.rows_T))


def joined_losses(parts: Sequence[Tensor], memory: Tensor) -> Tensor:
    """Losses, which lie in this memory, as one vector."""
    return _Joined.apply((memory,), *parts)


class _Joined(torch.autograd.Function):
    """Forward: shows the memory that the losses' backwards will write to. Backward: to each its own gradient."""

    @staticmethod
    def forward(ctx: Any, memory: tuple[Tensor], *parts: Tensor) -> Tensor:
        return memory[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].unbind()


class _HeadLoss(torch.autograd.Function):
    """Forward: keeps its input, and moves nothing.

    Backward, for each chunk: under sequence parallel an all-gather of the input, beside the chunk before; all-reduces
    of one max and of one pair of sums a token; and the sum of the input gradient beside the product for the weight
    gradient, an all-reduce or under sequence parallel a reduce-scatter. The weight gradient is not put off where a
    schedule puts others off: logits would have to be computed twice for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_sBH: Tensor,
        weight_VH: PlacedParameter,
        asked: tuple[Targets, Tensor, LogitChange],
        sharding: LayerSharding,
    ) -> Tensor:
        targets, loss, ctx.logits = asked
        ctx.save_for_backward(x_sBH, targets.rows_T, targets.skipped_T)
        # Not a saved tensor: the weight may be let go after the forward, and gathered again into other memory.
        ctx.weight, ctx.positions, ctx.completes, ctx.sharding = (
            weight_VH,
            targets.positions,
            targets.completes,
            sharding,
        )
        ctx.loss = loss  # by which the backward writes to the memory that is given away
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_sBH, rows_T, skipped_T = ctx.saved_tensors
        weight_VH: PlacedParameter = ctx.weight
        sharding: LayerSharding = ctx.sharding
        targets = Targets(rows_T, skipped_T, ctx.positions)
        dx_sBH, total = torch.empty_like(x_sBH), torch.zeros_like(ctx.loss)
        for chunk in _chunks(x_sBH, targets, sharding):
            softmax = _Softmax.of(chunk, weight_VH, sharding.tp, ctx.logits)
            total += softmax.loss
            dlogits_TV = softmax.gradient(grads[0] / len(rows_T), x_sBH.dtype)
            del softmax  # the gradient is in its memory, or in 16 bits
            summed = _start_input_gradient(dx_sBH[chunk.first : chunk.end], dlogits_TV, weight_VH, sharding)
            weight_VH.add_product(
                dlogits_TV, chunk.x_TH, sharding.tp.kind, is_last=ctx.completes and chunk.end == len(x_sBH)
            )
            summed.wait()
        ctx.loss.copy_(total.div_(len(rows_T)))
        return dx_sBH, None, None, None


def _start_input_gradient(
    into_sBH: Tensor, dlogits_TV: Tensor, weight_VH: PlacedParameter, sharding: LayerSharding
) -> Pending:
    """The sum over tp of dlogits W, once what is pending is over."""
    if sharding.shards_sequence:
        dx_TH = dlogits_TV @ weight_VH
        return start_reduce_scatter(into_sBH.flatten(0, 1), dx_TH, sharding.tp)
    return start_all_reduce(torch.mm(dlogits_TV, weight_VH, out=into_sBH.flatten(0, 1)), sharding.tp)


@dataclass(frozen=True)
class _Chunk:
    """Positions [first, end) of s: their inputs, targets and which of these have no loss, of all ranks of tp where
    these share the sequence."""

    first: int
    end: int
    x_TH: Tensor
    rows_T: Tensor
    skipped_T: Tensor | None


def _chunks(x_sBH: Tensor, targets: Targets, sharding: LayerSharding) -> Iterator[_Chunk]:
    """The chunks of a microbatch. Under sequence parallel each moves an all-gather, beside the chunk before."""
    parts_sBH, batch = x_sBH.split(targets.positions), x_sBH.shape[1]
    num_sharing = sharding.tp.size if sharding.shards_sequence else 1

    def of_chunk(values_T: Tensor, first: int, end: int) -> Tensor:
        return values_T.view(num_sharing, -1, batch)[:, first:end].flatten()

    coming, first = start_gather_again(parts_sBH[0], sharding), 0
    for part_sBH, following_sBH in zip(parts_sBH, (*parts_sBH[1:], None), strict=True):
        (x_SBH, arrival), end = coming, first + len(part_sBH)
        if following_sBH is not None:
            coming = start_gather_again(following_sBH, sharding)
        if arrival is not None:
            arrival.wait()
        skipped_T = None if targets.skipped_T is None else of_chunk(targets.skipped_T, first, end)
        yield _Chunk(first, end, x_SBH.flatten(0, 1), of_chunk(targets.rows_T, first, end), skipped_T=skipped_T)
        first = end


def _logits(x_TH: Tensor, weight_HV: Tensor, kind: str) -> Tensor:
    """x W in float32, with the kernels of a kind of device: on CUDA one multiplies 16-bit numbers and gives float32."""
    if kind == "cuda" and x_TH.dtype != torch.float32:
        return torch.mm(x_TH, weight_HV, out_dtype=torch.float32)
    return (x_TH @ weight_HV).float()


@dataclass(frozen=True)
class _Softmax:
    """The softmax of a chunk's logits, float32: what `exponential_sums` left of the logits [T, V], their largest over
    all ranks [T], and the totals of their exponentials [T]; `loss` is the sum of its losses."""

    left_TV: Tensor
    largest_T: Tensor
    totals_T: Tensor
    rows_T: Tensor
    elsewhere_T: Tensor
    skipped_T: Tensor | None
    change: LogitChange
    loss: Tensor

    @classmethod
    def of(cls, chunk: _Chunk, weight_VH: Tensor, tp: Axis, change: LogitChange) -> "_Softmax":
        """The softmax of the product with the head. Moves all-reduces of one max and one pair of sums a token."""
        logits_TV = _logits(chunk.x_TH, weight_VH.t(), tp.kind)
        change.change(logits_TV)
        largest_T = all_reduce_max(logits_TV.amax(dim=-1), tp)
        elsewhere_T = (chunk.rows_T < 0) | (chunk.rows_T >= logits_TV.shape[-1])
        rows_T = chunk.rows_T.masked_fill(elsewhere_T, 0)
        target_T = (logits_TV.gather(-1, rows_T[:, None]).squeeze(-1) - largest_T).masked_fill(elsewhere_T, 0.0)
        sums_T = torch.empty_like(largest_T)
        exponential_sums(logits_TV, largest_T, change.cap > 0, sums_T)
        target_T, totals_T = all_reduce(torch.stack((target_T, sums_T)), tp)
        losses_T = totals_T.log() - target_T
        if chunk.skipped_T is not None:
            losses_T = losses_T.masked_fill(chunk.skipped_T, 0.0)
        return cls(logits_TV, largest_T, totals_T, rows_T, elsewhere_T, chunk.skipped_T, change, loss=losses_T.sum())

    def gradient(self, of_loss: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the product, [T, V], for this gradient of each loss. Overwrites what was left of logits."""
        of_losses_T = (of_loss * self.change.scale).expand(len(self.rows_T))
        if self.skipped_T is not None:
            of_losses_T = of_losses_T.masked_fill(self.skipped_T, 0.0)
        here_T = of_losses_T.masked_fill(self.elsewhere_T, 0.0)
        left_TV = self.left_TV
        gradient_TV = left_TV if dtype == left_TV.dtype else torch.empty_like(left_TV, dtype=dtype)
        factors_T = of_losses_T / self.totals_T
        softmax_gradient(left_TV, self.largest_T, factors_T, self.rows_T, here_T, self.change.cap, gradient_TV)
        return gradient_TV
