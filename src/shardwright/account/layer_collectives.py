"""The collectives of our runtime for each operator of a layer, an embedding or a head, laid over the one list of
operators.

The exchanges of operators are those of workload/layers.py, with what this runtime does where software differs: the
loss is shared over tp, rows to experts travel in the numbers of the model, gradients of keys and values in float32.
Beside them stand collectives of a few numbers a token, which predictions leave out: of the loss, of routers, of what
goes with tokens to experts, and the largest values that scales of fp8 come from. Counts and bytes are the ledger's.

Letters: T tokens of a microbatch within the layers, E experts, K choices of a token, H hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.account.kept_tensors import FLOAT32, INT32, INT64, Share
from shardwright.account.moe_activations import tokens_sent
from shardwright.config.job import JobSpec
from shardwright.config.layer_kind import is_layer
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import ep_ranks_of_node
from shardwright.config.precision import FLOAT8_TILE
from shardwright.config.software import software_of
from shardwright.sharding.even_routing import even_shares, rows_inside, rows_to_nodes
from shardwright.sharding.loss_chunks import num_loss_chunks
from shardwright.workload.layer_operators import LayerOperator, piece_operators
from shardwright.workload.layers import Chain, chains
from shardwright.workload.operators import Exchange, Operator
from shardwright.workload.query import grid_of

# What of a generation of software the collectives depend on, as this runtime has it.
_OURS = {"head_parallel": True, "loss_in_backward": True, "dispatch_bytes": 2, "key_gradient_bytes": 4}


@dataclass(frozen=True)
class CollectiveCalls:
    """Calls of one collective on one axis for one pass of one operator, and the bytes of all of them. Where dispatch
    minds the borders of nodes, `reach` says on which side of them it stays."""

    kind: str
    axis: str
    calls: int
    num_bytes: int
    reach: Literal["any", "inside nodes", "between nodes"] = "any"


Collectives = tuple[CollectiveCalls, ...]


@dataclass(frozen=True)
class OperatorCollectives:
    """The collectives of one operator: in every forward; besides, in the one forward that keeps a graph; and in the
    backward."""

    of: Operator
    forward: Collectives
    with_graph: Collectives
    backward: Collectives

    @property
    def name(self) -> str:
        """The operator's."""
        return self.of.name


@dataclass(frozen=True)
class _LedgerRank:
    """The rank whose collectives are listed: its job, and its place on its ep line."""

    job: JobSpec
    ep_index: int

    @cached_property
    def share(self) -> Share:
        return Share.of(self.job)

    @cached_property
    def tokens(self) -> int:
        """T."""
        return int(self.share.tensors.tokens)

    @cached_property
    def shards_sequence(self) -> bool:
        return self.job.plan.sequence_parallel and self.job.plan.tp > 1

    @cached_property
    def splits(self) -> list[tuple[str, int]]:
        """The axes whose ranks hold parts of a microbatch's tokens between the layers, innermost first."""
        plan = self.job.plan
        return [("tp", plan.tp)] * self.shards_sequence + [("cp", plan.cp)] * (plan.cp > 1)


def piece_collectives(job: JobSpec, kind: str, ep_index: int = 0) -> tuple[OperatorCollectives, ...]:
    """The collectives of a piece's operators for one microbatch, on a rank with this place on its ep line; a piece is a
    layer of a kind, "embedding", "head" or "mtp"."""
    rank = _LedgerRank(job, ep_index)
    return tuple(
        OperatorCollectives(
            o,
            (*_listed(rank, o.forward), *_forward(rank, o.of, kind)),
            tuple(_counts(rank)) if o.name == "router" else (),
            (
                *_listed(rank, o.backward, num_loss_chunks(job) if o.of.part == "head" else 1),
                *_backward(rank, o.of, kind),
            ),
        )
        for o in _chain(job, kind)
    )


def _chain(job: JobSpec, kind: str) -> Chain:
    """The operators of the one list, as this runtime has them."""
    software = software_of(job.cluster.software).model_copy(update=_OURS)
    grid = grid_of(job).having({"precision": job.precision.compute})  # products alone are in fp8
    return chains(shape_of(job.model), grid, software)[kind]


def _listed(rank: _LedgerRank, exchanges: tuple[Exchange, ...], num_parts: int = 1) -> Iterator[CollectiveCalls]:
    """Exchanges of the one list as the ledger counts them, each in so many parts. Rows on their way to experts are
    `_hops`'."""
    for exchange in exchanges:
        size, kind, calls = round(float(exchange.size)), str(exchange.kind), num_parts
        if exchange.axis == "ep" or not size:
            continue
        if kind == "ring":  # a rank passes on what the others have
            hops = rank.job.plan.cp - 1
            kind, calls, size = "exchange", hops * exchange.rounds, size * hops // rank.job.plan.cp
        yield CollectiveCalls(kind, exchange.axis, calls, size)


def _forward(rank: _LedgerRank, o: LayerOperator, kind: str) -> Iterator[CollectiveCalls]:
    if o.name in _AHEAD:
        yield from _AHEAD[o.name](rank)
    for matrix in _float8_matrices(rank, o, kind):
        if matrix.is_row_parallel:
            yield from _largest(rank, matrix)


def _backward(rank: _LedgerRank, o: LayerOperator, kind: str) -> Iterator[CollectiveCalls]:
    if o.name in _BACK:
        yield from _BACK[o.name](rank)
    for matrix in _float8_matrices(rank, o, kind):
        if not matrix.is_row_parallel:
            yield from _largest(rank, matrix)


# The loss.


def _loss(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """The largest logit of each token, and then the target's and the sum of exponentials, of each chunk
    (model/loss.py)."""
    if rank.job.plan.tp > 1:
        yield CollectiveCalls("all_reduce", "tp", 2 * num_loss_chunks(rank.job), 3 * FLOAT32 * rank.tokens)


# Attention.


def _squares(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Two numbers a token, where all heads' queries are normed together, and all keys (model/head_norms.py)."""
    if rank.job.model.qk_norm == "full" and rank.job.plan.tp > 1:
        yield CollectiveCalls("all_reduce", "tp", 1, 2 * FLOAT32 * rank.tokens)


# Routers.


def _gathers(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Logits and positions of all tokens of a microbatch, where what a token gets depends on the others
    (model/router.py)."""
    moe, plan = rank.job.model.moe, rank.job.plan
    if moe.capacity(rank.job.model.sequence * plan.microbatch_size) is None:
        return
    rows, positions = int(rank.share.tensors.tokens_here), rank.job.tokens_between
    for axis, size in rank.splits:
        rows, positions = rows * size, positions * size
        yield CollectiveCalls("all_gather", axis, 2, FLOAT32 * rows * moe.experts + INT64 * positions)


def _counts(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """How often each expert was chosen in each sample, for the loss that keeps them even."""
    moe = rank.job.model.moe
    if moe.aux_loss != "none" and moe.aux_scope != "global":
        for axis, _ in rank.splits:
            yield CollectiveCalls("all_reduce", axis, 1, INT64 * rank.job.plan.microbatch_size * moe.experts)


# Tokens on their way to experts.


def _choices(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Experts and weights of all tokens of the tp line, each of whose ranks has a part of every expert."""
    if rank.job.plan.expert_tp_size > 1 and rank.shards_sequence:
        yield CollectiveCalls("all_gather", "tp", 2, (INT64 + FLOAT32) * rank.tokens * rank.job.model.moe.num_chosen)


def _gradients_of_weights(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Gradients of the weights of choices, of which each rank of the tp line has a part."""
    if rank.job.plan.expert_tp_size > 1:
        kind = "reduce_scatter" if rank.shards_sequence else "all_reduce"
        yield CollectiveCalls(kind, "tp", 1, FLOAT32 * rank.tokens * rank.job.model.moe.num_chosen)


@dataclass(frozen=True)
class _Hop:
    """Rows that a rank sends to others over an axis and gets back, of so many bytes a row; and numbers of rows, one for
    each `count`, that go ahead of them."""

    num_ranks: int
    index: int
    num_rows: int
    num_counts: int
    reach: Literal["any", "inside nodes", "between nodes"] = "any"

    @property
    def arrived(self) -> int:
        """Rows that come here, from all ranks of the axis."""
        return self.num_ranks * even_shares(self.num_rows, self.num_ranks)[self.index]

    def counts(self) -> Iterator[CollectiveCalls]:
        if self.num_ranks > 1:
            yield CollectiveCalls("all_to_all", "ep", 1, INT64 * self.num_counts, self.reach)

    def there(self, row_bytes: int) -> Iterator[CollectiveCalls]:
        if self.num_ranks > 1:
            rows = self.num_rows - even_shares(self.num_rows, self.num_ranks)[self.index]
            yield CollectiveCalls("all_to_all_v", "ep", 1, rows * row_bytes, self.reach)

    def back(self, row_bytes: int) -> Iterator[CollectiveCalls]:
        if self.num_ranks > 1:
            rows = self.arrived - self.arrived // self.num_ranks
            yield CollectiveCalls("all_to_all_v", "ep", 1, rows * row_bytes, self.reach)


def _hops(rank: _LedgerRank) -> tuple[_Hop, ...]:
    """The way of rows to experts: straight, or where dispatch is node-aware to the nodes and on inside of them."""
    job = rank.job
    plan, moe = job.plan, job.model.moe
    tokens, here = tokens_sent(job, rank.share), 0
    if plan.dispatch == "node-aware":
        here = ep_ranks_of_node(plan, job.cluster.devices_per_node)
    if here in (0, plan.ep):
        return (_Hop(plan.ep, rank.ep_index, tokens * moe.num_chosen, moe.experts),)
    nodes, (node, place) = plan.ep // here, divmod(rank.ep_index, here)
    between = _Hop(nodes, node, rows_to_nodes(tokens, moe.num_chosen, nodes), nodes, "between nodes")
    rows = rows_inside(between.arrived, moe.num_chosen, nodes)
    return between, _Hop(here, place, rows, moe.experts // nodes, "inside nodes")


def _dispatched(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Tokens to their experts, with the weight of each choice; node-aware, the experts and weights of all their choices
    go with them to the node."""
    moe = rank.job.model.moe
    first, *inside = _hops(rank)
    if inside and moe.gate_facts.sees_all:  # ranks agree on the most choices of a token
        yield CollectiveCalls("all_reduce", "ep", 1, INT64)
    for hop in (first, *inside):
        yield from (*hop.counts(), *_rows_there(rank, hop))
    if inside:
        yield from (*first.there(FLOAT32 * moe.num_chosen), *first.there(INT32 * moe.num_chosen))
    yield from (inside or [first])[-1].there(FLOAT32)


def _dispatched_back(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Gradients of what was dispatched, and of the weights."""
    first, *inside = _hops(rank)
    yield from (inside or [first])[-1].back(FLOAT32)
    yield from _returned(rank)
    if inside:
        yield from first.back(FLOAT32 * rank.job.model.moe.num_chosen)


def _returned(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """The collectives that bring the results of experts back to their tokens."""
    for hop in reversed(_hops(rank)):
        yield from hop.back(rank.share.element * rank.job.model.hidden)


def _returned_back(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Gradients of what experts made."""
    for hop in _hops(rank):
        yield from _rows_there(rank, hop)


def _rows_there(rank: _LedgerRank, hop: _Hop) -> Iterator[CollectiveCalls]:
    """Rows on their way to experts, in fp8 with a scale for each tile besides."""
    hidden = rank.job.model.hidden
    if not rank.job.precision.float8_dispatch:
        yield from hop.there(rank.share.element * hidden)
        return
    yield from (*hop.there(hidden), *hop.there(FLOAT32 * -(-hidden // FLOAT8_TILE)))


# Scales of fp8.


def _float8_matrices(rank: _LedgerRank, o: LayerOperator, kind: str) -> list[Matrix]:
    """The matrices of an operator whose products are in fp8 with scales that ranks of tp find together, each step
    anew."""
    plan = rank.job.plan
    if rank.job.precision.float8 not in ("tensorwise", "rowwise") or not is_layer(kind):
        return []
    return [m for m in _cut_matrices(o) if (plan.expert_tp_size if m.experts else plan.tp) > 1]


def _cut_matrices(o: LayerOperator) -> list[Matrix]:
    """The matrices of an operator whose products may be in fp8: those that tp may cut."""
    return [p.matrix for p in o.products if p.matrix.cut is not None]


def _largest(rank: _LedgerRank, matrix: Matrix) -> Iterator[CollectiveCalls]:
    """The largest value of the operand of a product that tp cuts: of all of it, of experts each one's, or of each
    token's row."""
    numbers = rank.tokens if rank.job.precision.float8 == "rowwise" else 1
    if matrix.experts:
        by_row = rank.job.precision.float8 == "rowwise"
        numbers = _hops(rank)[-1].arrived if by_row else matrix.experts // rank.job.plan.ep
    yield CollectiveCalls("all_reduce", "tp", 1, FLOAT32 * numbers)


def cast_collectives(job: JobSpec, kind: str, of_experts: bool) -> Collectives:
    """The collectives to cast a layer's weights, those of its experts or the others, to fp8 once for both products with
    each: the largest value of a whole weight, or of each of its rows in the direction that tp cuts."""
    rank, collectives = _LedgerRank(job, 0), []
    matrices = [m for o in piece_operators(shape_of(job.model), kind) for m in _float8_matrices(rank, o, kind)]
    for matrix in (m for m in matrices if bool(m.experts) == of_experts):
        rows = matrix.columns if matrix.is_row_parallel else matrix.inner
        numbers = rows if job.precision.float8 == "rowwise" else 1
        each = max(1, matrix.experts // job.plan.ep)
        collectives.append(CollectiveCalls("all_reduce", "tp", each, each * FLOAT32 * numbers))
    return tuple(collectives)


def num_float8_matrices(job: JobSpec, kind: str, of_experts: bool = False) -> int:
    """Matrices of a layer whose products are in fp8, where any are, on one rank: that all tokens meet, or experts'."""
    matrices = [m for o in piece_operators(shape_of(job.model), kind) for m in _cut_matrices(o)]
    return sum(max(1, m.experts // job.plan.ep) for m in matrices if bool(m.experts) == of_experts)


_Overlay = dict[str, Callable[[_LedgerRank], Iterator[CollectiveCalls]]]
_AHEAD: _Overlay = {
    "rotary": _squares, "router": _gathers, "experts enter": _choices, "dispatch": _dispatched, "combine": _returned,
}  # fmt: skip
_BACK: _Overlay = {
    "head": _loss, "rotary": _squares, "experts enter": _gradients_of_weights, "dispatch": _dispatched_back,
    "combine": _returned_back,
}  # fmt: skip
