"""Output head and cross entropy over a vocabulary that is split over tp, in chunks of tokens.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3): ranks exchange three numbers for each token (largest logit, logit of
the target, sum of exponentials) instead of its logits over the whole vocabulary.

No rank holds the logits of more than one chunk of tokens (sharding/block_sizes.py). The gradients of a chunk are
computed while its logits are in memory, so logits are computed once. This happens in the backward: the forward
keeps only the hidden states, however many microbatches are in flight.

The tensors that its backward keeps are listed in memory/activations.py; their sizes are in memory/kept_tensors.py
(InnerEnds).

Shape suffixes: s positions of this rank between the layers (under sequence parallel 1 / tp of those within a layer),
B batch, H hidden, T tokens of a microbatch or of a chunk, V rows of the vocabulary on this rank, W columns of
logits: V, or more where V is no size that kernels are fast with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.config.model import ModelSpec
from shardwright.model.fused_softmax import exponential_sums, softmax_gradient
from shardwright.parallel.comm.collectives import (
    Axis,
    Pending,
    all_reduce,
    all_reduce_max,
    start_all_reduce,
    start_reduce_scatter,
)
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding, ProductInput, start_gather_again
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded
from shardwright.precision.fused_operator import fused_operator
from shardwright.sharding.block_sizes import logit_columns


@dataclass(frozen=True)
class Targets:
    """The targets of a microbatch's tokens, in order of position. `rows_T` are rows of the vocabulary, counted from
    this rank's first row; `skipped_T` masks the tokens without a loss, None if all have one. `positions` is the number
    of positions in a chunk. The loss `completes` the head's gradient if no later backward adds to it."""

    rows_T: Tensor
    skipped_T: Tensor | None
    positions: int
    completes: bool = True


@dataclass(frozen=True)
class LogitChange:
    """A change of logits before their softmax: a scale (Granite), and a soft cap, cap x tanh(logit / cap) (Gemma 2,
    arXiv 2408.00118, section 2); 0 is no cap."""

    scale: float = 1.0
    cap: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        """The changed logits. In new memory, unless nothing changes."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def change(self, logits_TV: Tensor) -> None:
        """Change logits in place; on CUDA in one pass."""
        if self != LogitChange():
            _change(logits_TV, self.scale, self.cap)


def _change_in_turn(logits_TV: Tensor, scale: float, cap: float) -> None:
    logits_TV.mul_(scale / cap if cap else scale)
    if cap:
        logits_TV.tanh_().mul_(cap)


def _change_at_once(logits_TV: Tensor, scale: float, cap: float) -> None:
    logits_TV.copy_(torch.tanh(logits_TV * (scale / cap)) * cap if cap else logits_TV * scale)


_change = fused_operator(
    "change_logits(Tensor(a!) logits, float scale, float cap) -> ()", _change_in_turn, _change_at_once
)


_NO_CHANGE = LogitChange()


class HeadWeights(NamedTuple):
    """The rows of a head on this rank: its matrix, and the biases of logits, if there are some."""

    matrix_VH: PlacedParameter
    bias_V: PlacedParameter | None = None


class Head(ColumnLinear):
    """The output head, with biases of the logits if the model has them."""

    def __init__(self, spec: ModelSpec, sharding: LayerSharding) -> None:
        super().__init__(spec.hidden, (spec.vocab,), 0, sharding, std=spec.init_std)
        self.bias = sharded((spec.vocab,), 0, sharding.tp, "zeros") if spec.head_bias else None

    def forward(self, x_sBH: ProductInput) -> Tensor:
        """[s, B, H] to [S, B, V]."""
        logits_SBV = super().forward(x_sBH)
        return logits_SBV if self.bias is None else logits_SBV + self.bias

    @property
    def weights(self) -> HeadWeights:
        """The parameters of this rank."""
        return HeadWeights(self.weight, self.bias)


def microbatch_loss(
    x_sBH: Tensor,
    head: HeadWeights,
    targets: Targets,
    sharding: LayerSharding,
    loss_memory: Tensor | None = None,
    logit_change: LogitChange = _NO_CHANGE,
) -> Tensor:
    """The mean cross entropy of this rank's tokens, a float32 number; a target without a loss counts as 0. The logits
    take `logit_change` before their softmax.

    With gradients the result is 0 until its backward writes the value: into `loss_memory`, or new memory without it.
    """
    if torch.is_grad_enabled():
        loss_memory = torch.zeros((), device=x_sBH.device) if loss_memory is None else loss_memory
        return _HeadLoss.apply(x_sBH, head.matrix_VH, head.bias_V, (targets, loss_memory, logit_change), sharding)
    total = torch.zeros((), device=x_sBH.device)
    rows = _HeadRows.of(head, sharding.tp.kind)
    for chunk in _chunks(x_sBH, targets, sharding):
        total += _Softmax.of(chunk, rows, sharding.tp, logit_change).loss
    return total.div_(len(targets.rows_T))


def joined_losses(parts: Sequence[Tensor], memory: Tensor) -> Tensor:
    """Losses that lie in one memory, as a vector."""
    return _Joined.apply((memory,), *parts)


class _Joined(torch.autograd.Function):
    """Forward: returns the memory that the losses' backwards will write. Backward: passes each loss its gradient."""

    @staticmethod
    def forward(ctx: Any, memory: tuple[Tensor], *parts: Tensor) -> Tensor:
        return memory[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].unbind()


class _HeadLoss(torch.autograd.Function):
    """Forward: keeps its input, and communicates nothing.

    Backward, for each chunk: under sequence parallel an all-gather of the input, overlapped with the previous chunk;
    all-reduces of one max and of one pair of sums for each token; and the sum of the input gradient, overlapped with
    the product for the weight gradient: an all-reduce, or under sequence parallel a reduce-scatter. The weight gradient
    is never deferred, even if the schedule defers others: logits would have to be computed twice for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_sBH: Tensor,
        weight_VH: PlacedParameter,
        bias_V: PlacedParameter | None,
        loss_arguments: tuple[Targets, Tensor, LogitChange],
        sharding: LayerSharding,
    ) -> Tensor:
        targets, loss, ctx.logit_change = loss_arguments
        ctx.save_for_backward(x_sBH, targets.rows_T, targets.skipped_T)
        # Not a saved tensor: the weight may be freed after the forward, and gathered again into other memory.
        ctx.weight, ctx.bias, ctx.sharding = weight_VH, bias_V, sharding
        ctx.positions, ctx.completes = targets.positions, targets.completes
        ctx.loss = loss  # the backward writes the value into this memory, which the caller has
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x_sBH, rows_T, skipped_T = ctx.saved_tensors
        weight_VH: PlacedParameter = ctx.weight
        bias_V: PlacedParameter | None = ctx.bias
        sharding: LayerSharding = ctx.sharding
        targets = Targets(rows_T, skipped_T, ctx.positions)
        dx_sBH, total = torch.empty_like(x_sBH), torch.zeros_like(ctx.loss)
        rows = _HeadRows.of(HeadWeights(weight_VH, bias_V), sharding.tp.kind)
        for chunk in _chunks(x_sBH, targets, sharding):
            softmax = _Softmax.of(chunk, rows, sharding.tp, ctx.logit_change)
            total += softmax.loss
            dlogits_TW = softmax.gradient(grads[0] / len(rows_T), x_sBH.dtype)
            del softmax  # the gradient lies in its memory, or is a 16-bit tensor
            dlogits_TV = dlogits_TW[:, : rows.num_rows]
            if rows.has_more:
                dlogits_TW[:, rows.num_rows :] = 0  # of a capped -inf it is no number
            pending_sum = _start_input_gradient(dx_sBH[chunk.first : chunk.end], dlogits_TW, rows.matrix_WH, sharding)
            is_last = ctx.completes and chunk.end == len(x_sBH)
            if bias_V is not None:
                bias_V.add_gradient(dlogits_TV.sum(dim=0, dtype=torch.float32), is_last)
            if not weight_VH.place.is_frozen:
                weight_VH.add_product(dlogits_TV, chunk.x_TH, sharding.tp.kind, is_last=is_last)
            pending_sum.wait()
            del dlogits_TV, dlogits_TW  # before the next chunk has logits
        ctx.loss.copy_(total.div_(len(rows_T)))
        return dx_sBH, None, None, None, None


def _start_input_gradient(dx_sBH: Tensor, dlogits_TW: Tensor, weight_WH: Tensor, sharding: LayerSharding) -> Pending:
    """Start the sum over tp of dlogits W. `dx_sBH` holds it after the returned wait."""
    if sharding.shards_sequence:
        dx_TH = dlogits_TW @ weight_WH
        return start_reduce_scatter(dx_sBH.flatten(0, 1), dx_TH, sharding.tp)
    return start_all_reduce(torch.mm(dlogits_TW, weight_WH, out=dx_sBH.flatten(0, 1)), sharding.tp)


@dataclass(frozen=True)
class _Chunk:
    """Positions [first, end) of s: their inputs, their targets, and the mask of targets without a loss. Under sequence
    parallel a chunk has these positions of all tp ranks."""

    first: int
    end: int
    x_TH: Tensor
    rows_T: Tensor
    skipped_T: Tensor | None


def _chunks(x_sBH: Tensor, targets: Targets, sharding: LayerSharding) -> Iterator[_Chunk]:
    """The chunks of a microbatch. Under sequence parallel the all-gather of a chunk overlaps with the previous
    chunk."""
    parts_sBH, batch = x_sBH.split(targets.positions), x_sBH.shape[1]
    num_sharing = sharding.tp.size if sharding.shards_sequence else 1

    def of_chunk(values_T: Tensor, first: int, end: int) -> Tensor:
        return values_T.view(num_sharing, -1, batch)[:, first:end].flatten()

    next_gather, first = start_gather_again(parts_sBH[0], sharding), 0
    for part_sBH, following_sBH in zip(parts_sBH, (*parts_sBH[1:], None), strict=True):
        (x_SBH, pending), end = next_gather, first + len(part_sBH)
        if following_sBH is not None:
            next_gather = start_gather_again(following_sBH, sharding)
        if pending is not None:
            pending.wait()
        skipped_T = None if targets.skipped_T is None else of_chunk(targets.skipped_T, first, end)
        yield _Chunk(first, end, x_SBH.flatten(0, 1), of_chunk(targets.rows_T, first, end), skipped_T=skipped_T)
        first = end


@dataclass(frozen=True)
class _HeadRows:
    """A head as its products take it: `matrix_WH` has its `num_rows` rows, and on CUDA perhaps rows of zeros behind
    them (logit_columns)."""

    matrix_WH: Tensor
    num_rows: int
    bias_V: Tensor | None

    @classmethod
    def of(cls, head: HeadWeights, kind: str) -> "_HeadRows":
        """The rows for the kernels of a `kind` of device; a copy where there are more."""
        num_rows, width = head.matrix_VH.shape
        num_columns = logit_columns(num_rows, kind == "cuda")
        if num_columns == num_rows:
            return cls(head.matrix_VH, num_rows, head.bias_V)
        matrix_WH = head.matrix_VH.new_empty(num_columns, width)
        matrix_WH[:num_rows] = head.matrix_VH
        matrix_WH[num_rows:] = 0
        return cls(matrix_WH, num_rows, head.bias_V)

    def logits(self, x_TH: Tensor, kind: str, change: LogitChange) -> Tensor:
        """The changed logits in float32, [T, W]: -inf in columns of no row. CUDA has a kernel that multiplies 16-bit
        numbers into float32."""
        weight_HW = self.matrix_WH.t()
        if kind == "cuda" and x_TH.dtype != torch.float32:
            logits_TW = torch.mm(x_TH, weight_HW, out_dtype=torch.float32)
        else:
            logits_TW = (x_TH @ weight_HW).float()
        logits_TV = logits_TW[:, : self.num_rows]
        if self.bias_V is not None:
            logits_TV += self.bias_V
        change.change(logits_TV)
        if self.has_more:
            logits_TW[:, self.num_rows :] = -torch.inf
        return logits_TW

    @property
    def has_more(self) -> bool:
        """True if there are rows of zeros."""
        return len(self.matrix_WH) > self.num_rows


@dataclass(frozen=True)
class _Softmax:
    """The softmax of a chunk's logits, float32. `logits_or_exps_TW` is the memory of the logits after
    `exponential_sums`. `largest_T` is each token's largest logit and `totals_T` the sum of its exponentials, both over
    all tp ranks. `elsewhere_T` masks the tokens whose target is a row of another rank. `loss` is the sum of the chunk's
    losses."""

    logits_or_exps_TW: Tensor
    largest_T: Tensor
    totals_T: Tensor
    rows_T: Tensor
    elsewhere_T: Tensor
    skipped_T: Tensor | None
    change: LogitChange
    loss: Tensor

    @classmethod
    def of(cls, chunk: _Chunk, rows: _HeadRows, tp: Axis, change: LogitChange) -> "_Softmax":
        """The softmax of the product with the head. All-reduces one max and one pair of sums for each token."""
        logits_TW = rows.logits(chunk.x_TH, tp.kind, change)
        largest_T = all_reduce_max(logits_TW.amax(dim=-1), tp)
        elsewhere_T = (chunk.rows_T < 0) | (chunk.rows_T >= rows.num_rows)
        rows_T = chunk.rows_T.masked_fill(elsewhere_T, 0)
        target_T = (logits_TW.gather(-1, rows_T[:, None]).squeeze(-1) - largest_T).masked_fill(elsewhere_T, 0.0)
        sums_T = torch.empty_like(largest_T)
        exponential_sums(logits_TW, largest_T, change.cap > 0, sums_T)
        target_T, totals_T = all_reduce(torch.stack((target_T, sums_T)), tp)
        losses_T = totals_T.log() - target_T
        if chunk.skipped_T is not None:
            losses_T = losses_T.masked_fill(chunk.skipped_T, 0.0)
        return cls(logits_TW, largest_T, totals_T, rows_T, elsewhere_T, chunk.skipped_T, change, loss=losses_T.sum())

    def gradient(self, dloss: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the product with the head, [T, W]; `dloss` is the gradient of each token's loss. Overwrites
        `logits_or_exps_TW`."""
        dlosses_T = (dloss * self.change.scale).expand(len(self.rows_T))
        if self.skipped_T is not None:
            dlosses_T = dlosses_T.masked_fill(self.skipped_T, 0.0)
        dtargets_T = dlosses_T.masked_fill(self.elsewhere_T, 0.0)
        memory_TW = self.logits_or_exps_TW
        gradient_TW = memory_TW if dtype == memory_TW.dtype else torch.empty_like(memory_TW, dtype=dtype)
        factors_T = dlosses_T / self.totals_T
        softmax_gradient(memory_TW, self.largest_T, factors_T, self.rows_T, dtargets_T, self.change.cap, gradient_TW)
        return gradient_TW
