"""Expert parallel: the dispatch of tokens to their experts and back. Lepikhin et al. 2021 (arXiv 2006.16668, section
3.2).

A gate has chosen experts for each token (`Routing`); each rank of the ep axis has a block of the experts. One row is
sent for each choice: to the expert with the token and the choice's weight, and back with the expert's output times the
weight. Both directions are an all-to-all with uneven shares, and each is the backward of the other. Experts get the
weights, so that their outputs need not be kept for the weights' gradient.

Rows are in order of expert, then of sending rank, then of token. So an expert sees its tokens in the same order
whatever the size of the axis.

In node-aware dispatch a token crosses the slow link between two nodes once, however many of its experts are there
(DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.2). It is sent, with its choices and their weights, to the rank that
has the same index in that node, and from there to its experts over the fast links of the node. On the way back its
experts' outputs are first summed inside the node, and one sum crosses the slow link. In 16 bits that sum is rounded
once more than in direct dispatch.

Rows may be sent to experts in fp8: tokens, and in the backward gradients (section 3.3.3 there). Each token is cast
once, with a scale for each 128 of its elements, and dequantised by its receiver. Outputs are sent back uncast.

Shape suffixes: T tokens of this rank, K choices of a token, H hidden, E experts, e experts of this rank, P ranks of
the axis, R rows that this rank sends, N rows that it receives, M copies of tokens that reach this node through it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.parallel.comm.collectives import (
    Axis,
    NodeAxes,
    Pending,
    all_reduce_max,
    start_all_to_all,
    start_all_to_all_v,
)
from shardwright.parallel.device_streams import HostNumbers
from shardwright.parallel.expert.grouped_linear import count_each
from shardwright.precision.float8 import E4M3, Quantised, quantise
from shardwright.precision.float8_product import dequantise
from shardwright.sharding.routing_counts import even_shares, rows_inside, rows_to_nodes

_SUM_ELEMENTS = 1 << 24  # elements in float32 at a time, 64 MiB

# The experts of this rank: (rows [N, H], sorted by expert; their weights [N, 1], float32; the number of rows of each
# expert [e], int64 in host memory) to the outputs times the weights, [N, H].
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """The decision of a gate: experts of each token, [T, K], int64, and their weights, [T, K], float32.

    Expert -1 means a dropped choice: its weight is ignored and its gradient is 0. `varies` says that K may differ from
    rank to rank, as when experts choose tokens. In a dry run, in which choices have no values, `expected` is the number
    of choices that have an expert; None means all.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    varies: bool = False
    expected: int | None = None

    def as_wide_as_on(self, axis: Axis) -> "Routing":
        """The choices, padded to the largest K among the ranks of an axis. Moves one number, if K varies."""
        if not self.varies:
            return self
        num_choices = self.experts_TK.shape[1]
        largest = all_reduce_max(torch.full((1,), num_choices, device=self.experts_TK.device), axis)
        (widest,) = axis.numbers_or(largest, [num_choices])
        missing = (0, widest - num_choices)
        return Routing(functional.pad(self.experts_TK, missing, value=-1), functional.pad(self.weights_TK, missing))


@dataclass(frozen=True)
class DispatchPlan:
    """The destinations and the origins of the rows of one dispatch.

    `choice_R` is the choice of each row, as an index into [T x K]; `row_TK` is the row of each choice, or R, one after
    the last, if it has none. `arriving_N` reorders received rows from the order of sending ranks to the order of
    experts; it is None if both orders are the same.
    """

    choice_R: Tensor
    row_TK: Tensor
    num_sent: list[int]
    num_received: list[int]
    arriving_N: Tensor | None
    counts_e: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each row, [R]."""
        return self.choice_R // self.row_TK.shape[1]


@dataclass(frozen=True)
class Counting:
    """A dispatch whose counts are being copied to the host. `order_TK` are the choices in order of their experts, those
    without an expert last; `counts_Pe` are the numbers of rows that each rank sends to each expert of this rank."""

    experts_TK: Tensor
    order_TK: Tensor
    counts_Pe: Tensor
    numbers: HostNumbers


def start_counting(experts_TK: Tensor, num_experts: int, ep: Axis) -> Counting:
    """Begin a dispatch in which expert i of E is on index i // (E / P) of the axis.

    Moves the counts: one all-to-all of E numbers, for which on CUDA only the stream waits. On a CPU a forward keeps its
    turn in that short wait: it will soon send the rows, and meanwhile the other pass computes.
    """
    expert_TK = experts_TK.flatten()
    chosen_TK = torch.where(expert_TK < 0, num_experts, expert_TK)
    counts_E = count_each(chosen_TK, num_experts)
    counts_Pe = torch.empty_like(counts_E)
    start_all_to_all(counts_Pe, counts_E, ep).wait(keeps_turn=ep.turns.beside != "backward")
    counts_Pe = counts_Pe.view(ep.size, -1)
    numbers = torch.cat((counts_E.view(ep.size, -1).sum(1), counts_Pe.sum(1), counts_Pe.sum(0)))
    # The host does not wait: the device sorts the choices after the copy has begun.
    return Counting(experts_TK, torch.argsort(chosen_TK, stable=True), counts_Pe, HostNumbers(numbers, ep.streams))


def plan_dispatch(counting: Counting, ep: Axis, expected: int | None = None) -> DispatchPlan:
    """The plan of a dispatch. The host waits for the counts, since they are the shapes of all that follows. `expected`
    is the number of rows in a dry run, in which every expert gets equally many rows of each rank."""
    num_ranks, num_local = counting.counts_Pe.shape
    row_TK = torch.empty_like(counting.order_TK)
    dry: list[int] | None = None
    if row_TK.is_meta:
        rows_sent = even_shares(row_TK.numel() if expected is None else expected, num_ranks)
        rows_received = [rows_sent[ep.index]] * num_ranks
        dry = [*rows_sent, *rows_received, *even_shares(sum(rows_received), num_local)]
    numbers = counting.numbers.read(dry)
    num_sent, num_received = numbers[:num_ranks], numbers[num_ranks : 2 * num_ranks]
    counts_e = numbers[2 * num_ranks :]
    num_rows, num_arriving = sum(num_sent), sum(num_received)
    row_TK[counting.order_TK] = torch.arange(row_TK.numel(), device=row_TK.device).clamp_(max=num_rows)
    arriving_N = None
    if num_ranks > 1 and num_local > 1:
        local_Pe = torch.arange(num_local, device=row_TK.device).repeat(num_ranks)
        expert_N = local_Pe.repeat_interleave(counting.counts_Pe.flatten(), output_size=num_arriving)
        arriving_N = torch.argsort(expert_N, stable=True)
    return DispatchPlan(
        choice_R=counting.order_TK[:num_rows],
        row_TK=row_TK.view_as(counting.experts_TK),
        num_sent=num_sent,
        num_received=num_received,
        arriving_N=arriving_N,
        counts_e=torch.tensor(counts_e),
    )


@dataclass(frozen=True)
class Trip:
    """Tokens that will be sent to the experts of an axis and back, once the host knows the counts."""

    routing: Routing
    counting: Counting
    num_experts: int  # of all ranks of the axis
    ep: Axis


def start_trip(routing: Routing, num_experts: int, ep: Axis) -> Trip:
    """Begin to count rows, between nodes if the axis knows its nodes. The host may launch other work until it continues
    with `through_experts`."""
    if ep.by_node is None:
        return Trip(routing, start_counting(routing.experts_TK, num_experts, ep), num_experts, ep)
    between = ep.by_node.between
    routing = routing.as_wide_as_on(between)  # choices and weights are sent in rows of one width
    node_TK = torch.where(routing.experts_TK < 0, -1, routing.experts_TK // (num_experts // between.size))
    return Trip(routing, start_counting(each_once(node_TK), between.size, between), num_experts, ep)


def through_experts(x_TH: Tensor, trip: Trip, compute: Compute, in_float8: bool) -> Tensor:
    """The sum over the choices of each token of weight x expert output, [T, H] to [T, H].

    Every rank calls `compute`, even with no rows. Dispatch is node-aware if the axis knows its nodes. If `in_float8`,
    rows are sent to experts in fp8.
    """
    ep, routing = trip.ep, trip.routing
    if ep.by_node is not None:
        return _through_nodes(x_TH, trip, compute, ep.by_node, in_float8=in_float8)
    plan = plan_dispatch(trip.counting, ep, routing.expected)
    arrived = [*_Dispatch.apply(x_TH, routing.weights_TK, plan, ep, in_float8, True)]
    # The rows get no name here, so that their memory is free once the experts release them.
    y_NH = compute(arrived.pop(0), arrived.pop(), plan.counts_e)
    return _Combine.apply(y_NH, plan, ep, in_float8)


def _through_nodes(x_TH: Tensor, trip: Trip, compute: Compute, nodes: NodeAxes, in_float8: bool) -> Tensor:
    """Node-aware dispatch, in two levels: between nodes, each node acts as one expert, whose work is a dispatch to its
    own experts inside the node."""
    routing, num_nodes = trip.routing, nodes.between.size
    num_local = trip.num_experts // num_nodes
    num_tokens, num_choices = routing.experts_TK.shape
    plan = plan_dispatch(trip.counting, nodes.between, rows_to_nodes(num_tokens, num_choices, num_nodes))
    token_R = plan.tokens
    expert_RK = routing.experts_TK.index_select(0, token_R)
    node_RK = torch.where(expert_RK < 0, -1, expert_RK // num_local)
    node_R = node_RK.gather(1, (plan.choice_R % num_choices)[:, None])
    local_RK = torch.where(node_RK == node_R, expert_RK - node_R * num_local, -1)
    local = _start_dispatch(local_RK.int(), plan, nodes.between)
    # All weights are sent to each node; those of experts on other nodes are not used there, and get the gradient 0.
    arrived = [*_Dispatch.apply(x_TH, routing.weights_TK, plan, nodes.between, in_float8, False)]
    local_MK, weights_MK = local.wait_after_later_rows().long(), arrived.pop()
    node_routing = Routing(local_MK, weights_MK, expected=rows_inside(local_MK.shape[0], num_choices, num_nodes))
    inside = start_trip(node_routing, num_local, nodes.inside)
    return _Combine.apply(
        through_experts(arrived.pop(), inside, compute, in_float8=in_float8), plan, nodes.between, in_float8
    )


def each_once(node_TK: Tensor) -> Tensor:
    """The nodes of each token's choices, with each node once: repeated ones become -1."""
    same_TKK = node_TK[:, :, None] == node_TK[:, None, :]
    return node_TK.masked_fill(same_TKK.tril(-1).any(dim=2), -1)


@dataclass
class _Travelling:
    """Rows that are being sent: once they have arrived, `finish` returns them in their final order. Keeps the `operand`
    of the send alive until then."""

    pending: Pending | None
    operand: Tensor
    finish: Callable[[], Tensor]

    def wait(self, keeps_turn: bool = False) -> Tensor:
        """Wait for the rows and return them. Another pass that runs side by side computes meanwhile, unless this pass
        keeps its turn."""
        if self.pending is not None:
            self.pending.wait(keeps_turn)
        return self.finish()

    def wait_after_later_rows(self) -> Tensor:
        """Wait for the rows and return them, if rows that were sent later have arrived already. These rows will arrive
        soon, whichever pass computes on the other ranks. So the turn is kept: handed over, it would return late."""
        return self.wait(keeps_turn=True)


def _start_dispatch(x_RH: Tensor, plan: DispatchPlan, ep: Axis) -> _Travelling:
    """Send rows to their experts: [R, H] to [N, H]."""
    if ep.size == 1:
        return _Travelling(None, x_RH, lambda: x_RH)
    x_NH = x_RH.new_empty(sum(plan.num_received), x_RH.shape[1])
    pending = start_all_to_all_v(x_NH, x_RH, ep, plan.num_received, in_splits=plan.num_sent)
    order_N = plan.arriving_N
    return _Travelling(pending, x_RH, lambda: x_NH if order_N is None else x_NH.index_select(0, order_N))


def _start_tokens(x_TH: Tensor, plan: DispatchPlan, ep: Axis, in_float8: bool) -> Callable[[], Tensor]:
    """Send a row of each choice to its expert, [T, H] to [N, H]. Returns a function that waits for the received rows.
    With `in_float8`, rows are also rounded to fp8 if the axis has one rank."""
    tokens_R = plan.tokens
    if not in_float8:
        return _start_dispatch(x_TH.index_select(0, tokens_R), plan, ep).wait
    cast = quantise(x_TH, "tile", E4M3)
    scales = _start_dispatch(cast.scales.index_select(0, tokens_R), plan, ep)
    values = _start_dispatch(cast.values.view(torch.uint8).index_select(0, tokens_R), plan, ep)

    def dequantised() -> Tensor:
        values_NH = values.wait().view(E4M3)
        return dequantise(Quantised(values_NH, scales.wait_after_later_rows(), "tile"), x_TH.dtype)

    return dequantised


def _start_combine(y_NH: Tensor, plan: DispatchPlan, ep: Axis) -> _Travelling:
    """Send rows back from their experts: [N, H] to [R + 1, H]. The last row is 0, for choices without an expert."""
    num_rows = sum(plan.num_sent)
    y_RH = y_NH.new_empty(num_rows + 1, y_NH.shape[1])
    y_RH[num_rows] = 0
    if plan.arriving_N is not None:
        y_NH = torch.empty_like(y_NH).index_copy_(0, plan.arriving_N, y_NH)
    pending = start_all_to_all_v(y_RH[:num_rows], y_NH, ep, plan.num_sent, in_splits=plan.num_received)
    return _Travelling(pending, y_NH, lambda: y_RH)


def _sum_choices(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """Each token's sum over its choices, in order, [T, H]; added in float32, some tokens at a time."""
    sum_TH = y_RH.new_empty(row_TK.shape[0], y_RH.shape[1])
    num_tokens = max(1, _SUM_ELEMENTS // y_RH.shape[1])
    for some_TH, rows_TK in zip(sum_TH.split(num_tokens), row_TK.split(num_tokens), strict=True):
        first_T, *later_rows = rows_TK.unbind(1)
        total_TH = y_RH.index_select(0, first_T).float()
        for row_T in later_rows:
            total_TH += y_RH.index_select(0, row_T)
        some_TH.copy_(total_TH)
    return sum_TH


class _Dispatch(torch.autograd.Function):
    """Forward: all-to-alls of a row for each choice, with the token, and of weights: the weight of the choice, [N, 1],
    if `of_choices`, else the weights of all choices of the token, [N, K]. Backward: the gradients of both are sent
    back. Weights are sent before the rows, so that they cost no wait."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, plan: DispatchPlan, ep: Axis, in_float8: bool, of_choices: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.ep, ctx.of_choices = plan, ep, of_choices
        if of_choices:
            weights_RW = weights_TK.reshape(-1, 1).index_select(0, plan.choice_R)
        else:
            weights_RW = weights_TK.index_select(0, plan.tokens)
        weights = _start_dispatch(weights_RW, plan, ep)
        x_NH = _start_tokens(x_TH, plan, ep, in_float8)()
        return x_NH, weights.wait_after_later_rows()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: DispatchPlan = ctx.plan
        dx_NH, dweights_NW = grads
        weights = _start_combine(dweights_NW, plan, ctx.ep)
        dx_TH = _sum_choices(_start_combine(dx_NH, plan, ctx.ep).wait(), plan.row_TK)
        dweights_RW = weights.wait_after_later_rows()
        if ctx.of_choices:
            # The gradient of a choice without an expert is 0.
            dweights_TK = dweights_RW.index_select(0, plan.row_TK.flatten()).view(plan.row_TK.shape)
        else:
            dweights_TK = _sum_choices(dweights_RW, plan.row_TK)
        return dx_TH, dweights_TK, None, None, None, None


class _Combine(torch.autograd.Function):
    """Forward: the experts' rows are sent back and summed. Backward: an all-to-all of the gradients of the rows, as in
    a dispatch. Keeps nothing but the plan of the dispatch."""

    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, plan: DispatchPlan, ep: Axis, in_float8: bool) -> Tensor:
        ctx.plan, ctx.ep, ctx.in_float8 = plan, ep, in_float8
        return _sum_choices(_start_combine(y_NH, plan, ep).wait(), plan.row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _start_tokens(grads[0], ctx.plan, ctx.ep, ctx.in_float8)(), None, None, None
