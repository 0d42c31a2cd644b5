"""Expert parallel: how tokens travel to their experts and back. Lepikhin et al. 2021 (arXiv 2006.16668, section 3.2).

A gate has chosen experts for each token (`Routing`); experts live on the ranks of the ep axis, a block of them each.
One row travels for each choice: there with the token and the choice's weight, back with what the expert made of it,
weight included. Both ways are an all-to-all whose shares are as uneven as the choices, and each is the backward of the
other. Experts know the weights so that nothing of what comes back need be kept for their gradient.

Rows are in order of expert, then of the rank they come from, then of token. An expert thus sees its tokens in the
same order whatever the size of the axis.

Node-aware, a token crosses the slow link between two nodes once, however many of its experts are there (DeepSeek-AI
2024, arXiv 2412.19437, section 3.2.2). It goes to the rank with its own rank's place in that node, with its
choices and their weights, and from there to its experts over the fast links of the node. On the way back what they
made of it is added up inside the node first, and one sum crosses the slow link. In 16 bits that sum is rounded once
more than in direct dispatch.

On their way to experts rows may be in fp8, tokens and in the backward gradients (section 3.3.3 there): each token is
cast once, with a scale for each 128 of its numbers, and widened where it arrives. What comes back is as it was made.

Shape suffixes: T tokens of this rank, K choices of a token, H hidden, E experts, e experts of this rank, P ranks of
the axis, R rows that leave this rank, N rows that arrive, M copies of tokens that arrive at this node through it.
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
from shardwright.parallel.expert.counting import HostNumbers, count_each
from shardwright.precision.float8 import E4M3, Quantised, quantise
from shardwright.precision.float8_product import dequantise
from shardwright.sharding.even_routing import even_shares, rows_inside, rows_to_nodes

_SUM_ELEMENTS = 1 << 24  # that are in float32 at a time, 64 MiB

# What the experts of this rank make of the rows that came, [N, H] to [N, H], each times its weight, [N, 1] in float32.
# The last argument says how many rows each of them has, [e], int64 in host memory; the rows are sorted by expert.
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """The decision of a gate: experts of each token, [T, K], int64, and their weights, [T, K], float32.

    -1 is no expert: a choice that was dropped. Its weight is ignored and its gradient is 0. `varies` says that K may
    be another number on another rank, as where experts choose. In a dry run, where choices have no values, so many of
    them are `expected` to be of an expert, all if that is None.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    varies: bool = False
    expected: int | None = None

    def as_wide_as_on(self, axis: Axis) -> "Routing":
        """The choices, widened to the largest K of the ranks of an axis. Moves one number, where K varies."""
        if not self.varies:
            return self
        num_choices = self.experts_TK.shape[1]
        largest = all_reduce_max(torch.full((1,), num_choices, device=self.experts_TK.device), axis)
        (widest,) = axis.numbers_or(largest, [num_choices])
        missing = (0, widest - num_choices)
        return Routing(functional.pad(self.experts_TK, missing, value=-1), functional.pad(self.weights_TK, missing))


@dataclass(frozen=True)
class DispatchPlan:
    """Where the rows of one dispatch go, and where they came from.

    `choice_R` is the choice that each row is of, as an index into [T x K]; `row_TK` is the row of each choice, or R,
    one behind the last, if it has none. `arriving_N` puts rows in order of expert, from the order of the ranks they
    came from; it is None where the two are the same.
    """

    choice_R: Tensor
    row_TK: Tensor
    num_sent: list[int]
    num_received: list[int]
    arriving_N: Tensor | None
    counts_e: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token that each row is of, [R]."""
        return self.choice_R // self.row_TK.shape[1]


@dataclass(frozen=True)
class Counting:
    """A dispatch whose counts are on their way to the host. `order_TK` are the choices in order of their experts, those
    without one last; `counts_Pe` are the rows that each rank sends to each expert of this one."""

    experts_TK: Tensor
    order_TK: Tensor
    counts_Pe: Tensor
    numbers: HostNumbers


def start_counting(experts_TK: Tensor, num_experts: int, ep: Axis) -> Counting:
    """Begin a dispatch in which expert i of E is on index i // (E / P) of the axis.

    Moves the counts: one all-to-all of E numbers, that of CUDA's stream alone waits. On a CPU a forward keeps its turn
    in that short wait: it is about to send the rows, under which the pass beside it computes.
    """
    expert_TK = experts_TK.flatten()
    chosen_TK = torch.where(expert_TK < 0, num_experts, expert_TK)
    counts_E = count_each(chosen_TK, num_experts)
    counts_Pe = torch.empty_like(counts_E)
    start_all_to_all(counts_Pe, counts_E, ep).wait(keeps_turn=ep.turns.beside != "backward")
    counts_Pe = counts_Pe.view(ep.size, -1)
    numbers = torch.cat((counts_E.view(ep.size, -1).sum(1), counts_Pe.sum(1), counts_Pe.sum(0)))
    # The host may go on: the order is found behind the copy.
    return Counting(experts_TK, torch.argsort(chosen_TK, stable=True), counts_Pe, HostNumbers(numbers, ep.streams))


def plan_dispatch(counting: Counting, ep: Axis, expected: int | None = None) -> DispatchPlan:
    """Where rows go. The host waits for the counts, for they are the shapes of all that follows. `expected` are the
    rows of a dry run, in which every expert gets as many of each rank."""
    num_ranks, num_local = counting.counts_Pe.shape
    row_TK = torch.empty_like(counting.order_TK)
    dry: list[int] | None = None
    if row_TK.is_meta:
        sent = even_shares(row_TK.numel() if expected is None else expected, num_ranks)
        received = [sent[ep.index]] * num_ranks
        dry = [*sent, *received, *even_shares(sum(received), num_local)]
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
    """Tokens that are to go to the experts of an axis and back, once the host knows how many go where."""

    routing: Routing
    counting: Counting
    num_experts: int  # of all ranks of the axis
    ep: Axis


def start_trip(routing: Routing, num_experts: int, ep: Axis) -> Trip:
    """Begin to count, between nodes if the axis knows its nodes. The host may launch other work until the trip goes
    on."""
    if ep.by_node is None:
        return Trip(routing, start_counting(routing.experts_TK, num_experts, ep), num_experts, ep)
    between = ep.by_node.between
    routing = routing.as_wide_as_on(between)  # choices and weights travel by rows of one width
    node_TK = torch.where(routing.experts_TK < 0, -1, routing.experts_TK // (num_experts // between.size))
    return Trip(routing, start_counting(each_once(node_TK), between.size, between), num_experts, ep)


def through_experts(x_TH: Tensor, trip: Trip, compute: Compute, in_float8: bool = False) -> Tensor:
    """Sum over the choices of a token of weight x what the expert makes of it: [T, H] to [T, H].

    Every rank calls `compute`, be it with no rows. Tokens travel node-aware if the axis knows its nodes, and there
    `in_float8`.
    """
    ep, routing = trip.ep, trip.routing
    if ep.by_node is not None:
        return _through_nodes(x_TH, trip, compute, ep.by_node, in_float8=in_float8)
    planned = plan_dispatch(trip.counting, ep, routing.expected)
    arrived = [*_Dispatch.apply(x_TH, routing.weights_TK, planned, ep, in_float8, True)]
    # No name is given to the rows: what experts let go of them is then free.
    y_NH = compute(arrived.pop(0), arrived.pop(), planned.counts_e)
    return _Combine.apply(y_NH, planned, ep, in_float8)


def _through_nodes(x_TH: Tensor, trip: Trip, compute: Compute, nodes: NodeAxes, in_float8: bool) -> Tensor:
    """Between the nodes each of them is as an expert whose work is to send tokens through the experts that it has."""
    routing, num_nodes = trip.routing, nodes.between.size
    num_local = trip.num_experts // num_nodes
    num_tokens, num_choices = routing.experts_TK.shape
    planned = plan_dispatch(trip.counting, nodes.between, rows_to_nodes(num_tokens, num_choices, num_nodes))
    token_R = planned.tokens
    expert_RK = routing.experts_TK.index_select(0, token_R)
    node_RK = torch.where(expert_RK < 0, -1, expert_RK // num_local)
    node_R = node_RK.gather(1, (planned.choice_R % num_choices)[:, None])
    local_RK = torch.where(node_RK == node_R, expert_RK - node_R * num_local, -1)
    local = _start_dispatch(local_RK.int(), planned, nodes.between)
    # All weights travel: those of choices elsewhere are not used there, and their gradient from there is 0.
    arrived = [*_Dispatch.apply(x_TH, routing.weights_TK, planned, nodes.between, in_float8, False)]
    local_MK, weights_MK = local.wait_behind().long(), arrived.pop()
    there = Routing(local_MK, weights_MK, expected=rows_inside(local_MK.shape[0], num_choices, num_nodes))
    inside = start_trip(there, num_local, nodes.inside)
    return _Combine.apply(
        through_experts(arrived.pop(), inside, compute, in_float8=in_float8), planned, nodes.between, in_float8
    )


def each_once(node_TK: Tensor) -> Tensor:
    """The first choice of each node stays; those that repeat it become -1."""
    same_TKK = node_TK[:, :, None] == node_TK[:, None, :]
    return node_TK.masked_fill(same_TKK.tril(-1).any(dim=2), -1)


@dataclass
class _Travelling:
    """Rows on their way: once they have arrived, `finish` gives them as they are wanted. What is `sent` lives till
    then."""

    pending: Pending | None
    sent: Tensor
    finish: Callable[[], Tensor]

    def wait(self, keeps_turn: bool = False) -> Tensor:
        """The rows. A pass beside this one computes meanwhile, unless the turn is kept."""
        if self.pending is not None:
            self.pending.wait(keeps_turn)
        return self.finish()

    def wait_behind(self) -> Tensor:
        """The rows, where others were waited for that were sent after them: these are on the wire too, whoever
        computes on the other ranks. So the turn is kept: handed over, it would come back late."""
        return self.wait(keeps_turn=True)


def _start_dispatch(x_RH: Tensor, planned: DispatchPlan, ep: Axis) -> _Travelling:
    """Send rows to their experts: [R, H] to [N, H]."""
    if ep.size == 1:
        return _Travelling(None, x_RH, lambda: x_RH)
    x_NH = x_RH.new_empty(sum(planned.num_received), x_RH.shape[1])
    pending = start_all_to_all_v(x_NH, x_RH, ep, planned.num_received, in_splits=planned.num_sent)
    order_N = planned.arriving_N
    return _Travelling(pending, x_RH, lambda: x_NH if order_N is None else x_NH.index_select(0, order_N))


def _start_tokens(x_TH: Tensor, planned: DispatchPlan, ep: Axis, in_float8: bool) -> Callable[[], Tensor]:
    """Send a row of each choice to its expert, [T, H] to [N, H]; what is returned waits for the rows that come. In fp8
    they are rounded alike where they do not travel."""
    tokens_R = planned.tokens
    if not in_float8:
        return _start_dispatch(x_TH.index_select(0, tokens_R), planned, ep).wait
    cast = quantise(x_TH, "tile", E4M3)
    scales = _start_dispatch(cast.scales.index_select(0, tokens_R), planned, ep)
    values = _start_dispatch(cast.values.view(torch.uint8).index_select(0, tokens_R), planned, ep)

    def widened() -> Tensor:
        values_NH = values.wait().view(E4M3)
        return dequantise(Quantised(values_NH, scales.wait_behind(), "tile"), x_TH.dtype)

    return widened


def _start_combine(y_NH: Tensor, planned: DispatchPlan, ep: Axis) -> _Travelling:
    """Send rows back from their experts: [N, H] to [R + 1, H]. The last row is 0: that of choices without an expert."""
    num_rows = sum(planned.num_sent)
    y_RH = y_NH.new_empty(num_rows + 1, y_NH.shape[1])
    y_RH[num_rows] = 0
    if planned.arriving_N is not None:
        y_NH = torch.empty_like(y_NH).index_copy_(0, planned.arriving_N, y_NH)
    pending = start_all_to_all_v(y_RH[:num_rows], y_NH, ep, planned.num_sent, in_splits=planned.num_received)
    return _Travelling(pending, y_NH, lambda: y_RH)


def _sum_choices(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """Each token's sum over its choices in their order, [T, H], added up in float32, some tokens at a time."""
    sum_TH = y_RH.new_empty(row_TK.shape[0], y_RH.shape[1])
    num_tokens = max(1, _SUM_ELEMENTS // y_RH.shape[1])
    for some_TH, rows_TK in zip(sum_TH.split(num_tokens), row_TK.split(num_tokens), strict=True):
        first_T, *others = rows_TK.unbind(1)
        total_TH = y_RH.index_select(0, first_T).float()
        for row_T in others:
            total_TH += y_RH.index_select(0, row_T)
        some_TH.copy_(total_TH)
    return sum_TH


class _Dispatch(torch.autograd.Function):
    """Forward: all-to-alls of a row for each choice, with the token, and of their weights: that of the choice, [N, 1],
    if `of_choices`, else those of all choices of the token, [N, K]. Backward: the gradients of both come back. Weights
    are sent first, for nobody then has to wait for them."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, planned: DispatchPlan, ep: Axis, in_float8: bool, of_choices: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.planned, ctx.ep, ctx.of_choices = planned, ep, of_choices
        if of_choices:
            weights_RW = weights_TK.reshape(-1, 1).index_select(0, planned.choice_R)
        else:
            weights_RW = weights_TK.index_select(0, planned.tokens)
        weights = _start_dispatch(weights_RW, planned, ep)
        x_NH = _start_tokens(x_TH, planned, ep, in_float8)()
        return x_NH, weights.wait_behind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        planned: DispatchPlan = ctx.planned
        dx_NH, dweights_NW = grads
        weights = _start_combine(dweights_NW, planned, ctx.ep)
        dx_TH = _sum_choices(_start_combine(dx_NH, planned, ctx.ep).wait(), planned.row_TK)
        dweights_RW = weights.wait_behind()
        if ctx.of_choices:
            # That of a choice without an expert is 0.
            dweights_TK = dweights_RW.index_select(0, planned.row_TK.flatten()).view(planned.row_TK.shape)
        else:
            dweights_TK = _sum_choices(dweights_RW, planned.row_TK)
        return dx_TH, dweights_TK, None, None, None, None


class _Combine(torch.autograd.Function):
    """Forward: the experts' rows come back, and are added up. Backward: an all-to-all of the gradients of the rows, as
    in a dispatch. Keeps nothing but where rows go."""

    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, planned: DispatchPlan, ep: Axis, in_float8: bool) -> Tensor:
        ctx.planned, ctx.ep, ctx.in_float8 = planned, ep, in_float8
        return _sum_choices(_start_combine(y_NH, planned, ep).wait(), planned.row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _start_tokens(grads[0], ctx.planned, ctx.ep, ctx.in_float8)(), None, None, None
