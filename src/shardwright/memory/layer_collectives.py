"""The collectives of this runtime for each operator of a layer, an embedding or a head.

The exchanges of operators are those of layers/chains.py, with the choices of this runtime: the loss is shared over
tp, rows are sent to experts in the numbers of the model, gradients of keys and values in float32. Added are collectives
of a few numbers a token, which predictions leave out: those of the loss, of routers, of the weights and experts sent
with tokens, and of the largest values for scales of fp8. Counts and bytes are defined as in the ledger.

Letters: T tokens of a microbatch within the layers, E experts, K choices of a token, H hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.config.float8_facts import TILE
from shardwright.config.job import JobSpec
from shardwright.config.layer_kind import is_layer
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import ep_ranks_of_node
from shardwright.config.software import software_of
from shardwright.layers.chains import Chain, chains
from shardwright.layers.layer_operators import LayerOperator, piece_operators
from shardwright.layers.operators import Exchange, Operator
from shardwright.layers.query import grid_of
from shardwright.memory.kept_tensors import FLOAT32, INT32, INT64, Share
from shardwright.sharding.block_sizes import num_loss_chunks
from shardwright.sharding.routing_counts import even_shares, rows_inside, rows_to_nodes

# The fields of a software entry on which the collectives depend, with the values of this runtime.
_OWN_SOFTWARE = {"head_parallel": True, "loss_in_backward": True, "dispatch_bytes": 2, "key_gradient_bytes": 4}


@dataclass(frozen=True)
class CollectiveCalls:
    """Calls of one collective on one axis for one pass of one operator, and the bytes of all calls. `reach` says, for
    node-aware dispatch, if they stay inside nodes or go between nodes."""

    kind: str
    axis: str
    calls: int
    num_bytes: int
    reach: Literal["any", "inside nodes", "between nodes"] = "any"


Collectives = tuple[CollectiveCalls, ...]


@dataclass(frozen=True)
class OperatorCollectives:
    """The collectives of one operator: of every forward, further ones of a forward that keeps a graph, and of the
    backward."""

    operator: Operator
    forward: Collectives
    with_graph: Collectives
    backward: Collectives

    @property
    def name(self) -> str:
        """The name of the operator."""
        return self.operator.name


@dataclass(frozen=True)
class _LedgerRank:
    """The rank whose collectives are listed: its job, and its index on its ep line."""

    job: JobSpec
    ep_index: int

    @cached_property
    def share(self) -> Share:
        return Share.of(self.job)

    @cached_property
    def tokens(self) -> int:
        """T: tokens of a microbatch within the layers."""
        return int(self.share.tensors.tokens)

    @cached_property
    def shards_sequence(self) -> bool:
        return self.job.plan.sequence_parallel and self.job.plan.tp > 1

    @cached_property
    def splits(self) -> list[tuple[str, int]]:
        """(axis, ranks) for the axes that split a microbatch's tokens between the layers, innermost first."""
        plan = self.job.plan
        return [("tp", plan.tp)] * self.shards_sequence + [("cp", plan.cp)] * (plan.cp > 1)


def piece_collectives(job: JobSpec, kind: str, ep_index: int = 0) -> tuple[OperatorCollectives, ...]:
    """The collectives of a piece's operators for one microbatch, on the rank with this index on its ep line. A piece is
    a layer of a kind, "embedding", "head" or "mtp"."""
    rank = _LedgerRank(job, ep_index)
    return tuple(
        OperatorCollectives(
            operator,
            (*_listed(rank, operator.forward), *_forward(rank, operator.layer_operator, kind)),
            tuple(_counts(rank)) if operator.name == "router" else (),
            (
                *_listed(rank, operator.backward, num_loss_chunks(job) if operator.recompute_unit == "head" else 1),
                *_backward(rank, operator.layer_operator, kind),
            ),
        )
        for operator in _chain(job, kind)
    )


def _chain(job: JobSpec, kind: str) -> Chain:
    """The operators of a piece, with the choices of this runtime."""
    software = software_of(job.cluster.software).model_copy(update=_OWN_SOFTWARE)
    grid = grid_of(job).having({"precision": job.precision.compute})  # only products are in fp8
    return chains(shape_of(job.model), grid, software)[kind]


def _listed(rank: _LedgerRank, exchanges: tuple[Exchange, ...], num_parts: int = 1) -> Iterator[CollectiveCalls]:
    """Exchanges of an operator as the ledger counts them, each in `num_parts` calls. Leaves out rows sent to experts,
    for which there is `_hops`."""
    for exchange in exchanges:
        size, kind, calls = round(float(exchange.size)), str(exchange.kind), num_parts
        if exchange.axis == "ep" or not size:
            continue
        if kind == "ring":  # a rank passes on the parts of the others
            hops = rank.job.plan.cp - 1
            kind, calls, size = "exchange", hops * exchange.rounds, size * hops // rank.job.plan.cp
        yield CollectiveCalls(kind, exchange.axis, calls, size)


def _forward(rank: _LedgerRank, operator: LayerOperator, kind: str) -> Iterator[CollectiveCalls]:
    if operator.name in _FORWARD:
        yield from _FORWARD[operator.name](rank)
    for matrix in _matrices_on_tp(rank.job, operator, kind) if _shares_activation_scales(rank.job) else ():
        if matrix.is_row_parallel:
            yield from _largest_values(rank, matrix)


def _backward(rank: _LedgerRank, operator: LayerOperator, kind: str) -> Iterator[CollectiveCalls]:
    if operator.name in _BACKWARD:
        yield from _BACKWARD[operator.name](rank)
    for matrix in _matrices_on_tp(rank.job, operator, kind) if _shares_activation_scales(rank.job) else ():
        if not matrix.is_row_parallel:
            yield from _largest_values(rank, matrix)


# The loss.


def _loss(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """All-reduces of each chunk of the loss: the largest logit of each token, then the target's logit and the sum of
    exponentials (model/loss.py)."""
    if rank.job.plan.tp > 1:
        yield CollectiveCalls("all_reduce", "tp", 2 * num_loss_chunks(rank.job), 3 * FLOAT32 * rank.tokens)


# Attention.


def _squares(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Sums of two numbers a token, if the queries of all heads are normed together, and the keys
    (model/head_norms.py)."""
    if rank.job.model.qk_norm == "full" and rank.job.plan.tp > 1:
        yield CollectiveCalls("all_reduce", "tp", 1, 2 * FLOAT32 * rank.tokens)


# Routers.


def _gathers(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """All-gathers of logits and positions of all tokens of a microbatch, if the experts of a token depend on other
    tokens (model/router.py)."""
    moe, plan = rank.job.model.moe, rank.job.plan
    if moe.capacity(rank.job.model.sequence * plan.microbatch_size) is None:
        return
    rows, positions = int(rank.share.tensors.tokens_here), rank.job.tokens_between
    for axis, size in rank.splits:
        rows, positions = rows * size, positions * size
        yield CollectiveCalls("all_gather", axis, 2, FLOAT32 * rows * moe.experts + INT64 * positions)


def _counts(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Sums of how often each expert was chosen in each sample, for the loss that balances experts."""
    moe = rank.job.model.moe
    if moe.aux_loss != "none" and moe.aux_scope != "global":
        for axis, _ in rank.splits:
            yield CollectiveCalls("all_reduce", axis, 1, INT64 * rank.job.plan.microbatch_size * moe.experts)


# Tokens on their way to experts.


def _choices(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """All-gathers of experts and weights of all tokens of the tp line, if each of its ranks has a part of every
    expert."""
    if rank.job.plan.expert_tp_size > 1 and rank.shards_sequence:
        yield CollectiveCalls("all_gather", "tp", 2, (INT64 + FLOAT32) * rank.tokens * rank.job.model.moe.num_chosen)


def _gradients_of_weights(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Sums of the gradients of the choices' weights, if each rank of the tp line has a part of every expert."""
    if rank.job.plan.expert_tp_size > 1:
        kind = "reduce_scatter" if rank.shards_sequence else "all_reduce"
        yield CollectiveCalls(kind, "tp", 1, FLOAT32 * rank.tokens * rank.job.model.moe.num_chosen)


@dataclass(frozen=True)
class _Hop:
    """Rows that a rank sends to other ranks of an axis and gets back. Before them it sends `num_counts` numbers of
    rows."""

    num_ranks: int
    index: int
    num_rows: int
    num_counts: int
    reach: Literal["any", "inside nodes", "between nodes"] = "any"

    @property
    def arrived(self) -> int:
        """Rows that arrive here, from all ranks of the axis."""
        return self.num_ranks * even_shares(self.num_rows, self.num_ranks)[self.index]

    def counts(self) -> Iterator[CollectiveCalls]:
        if self.num_ranks > 1:
            yield CollectiveCalls("all_to_all", "ep", 1, INT64 * self.num_counts, self.reach)

    def send(self, row_bytes: int) -> Iterator[CollectiveCalls]:
        if self.num_ranks > 1:
            rows = self.num_rows - even_shares(self.num_rows, self.num_ranks)[self.index]
            yield CollectiveCalls("all_to_all_v", "ep", 1, rows * row_bytes, self.reach)

    def send_back(self, row_bytes: int) -> Iterator[CollectiveCalls]:
        if self.num_ranks > 1:
            rows = self.arrived - self.arrived // self.num_ranks
            yield CollectiveCalls("all_to_all_v", "ep", 1, rows * row_bytes, self.reach)


def _hops(rank: _LedgerRank) -> tuple[_Hop, ...]:
    """The hops of rows to experts: one hop, or with node-aware dispatch one to the node and one inside it."""
    job = rank.job
    plan, moe = job.plan, job.model.moe
    num_tokens, per_node = rank.share.tokens_sent, 0
    if plan.dispatch == "node-aware":
        per_node = ep_ranks_of_node(plan, job.cluster.devices_per_node)
    if per_node in (0, plan.ep):
        return (_Hop(plan.ep, rank.ep_index, num_tokens * moe.num_chosen, moe.experts),)
    nodes, (node, place) = plan.ep // per_node, divmod(rank.ep_index, per_node)
    between = _Hop(nodes, node, rows_to_nodes(num_tokens, moe.num_chosen, nodes), nodes, "between nodes")
    rows = rows_inside(between.arrived, moe.num_chosen, nodes)
    return between, _Hop(per_node, place, rows, moe.experts // nodes, "inside nodes")


def _dispatched(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Tokens sent to their experts, with the weight of each choice. With node-aware dispatch the experts and weights of
    all their choices are sent to the node with them."""
    moe = rank.job.model.moe
    first_hop, *inside_hops = _hops(rank)
    if inside_hops and moe.gate_facts.sees_all:  # ranks agree on the most choices of a token
        yield CollectiveCalls("all_reduce", "ep", 1, INT64)
    for hop in (first_hop, *inside_hops):
        yield from (*hop.counts(), *_send_rows(rank, hop))
    if inside_hops:
        yield from (*first_hop.send(FLOAT32 * moe.num_chosen), *first_hop.send(INT32 * moe.num_chosen))
    yield from (inside_hops or [first_hop])[-1].send(FLOAT32)


def _dispatched_back(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Gradients of the dispatched tokens and weights, sent back."""
    first_hop, *inside_hops = _hops(rank)
    yield from (inside_hops or [first_hop])[-1].send_back(FLOAT32)
    yield from _returned(rank)
    if inside_hops:
        yield from first_hop.send_back(FLOAT32 * rank.job.model.moe.num_chosen)


def _returned(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Results of experts, sent back to their tokens."""
    for hop in reversed(_hops(rank)):
        yield from hop.send_back(rank.share.element * rank.job.model.hidden)


def _returned_back(rank: _LedgerRank) -> Iterator[CollectiveCalls]:
    """Gradients of the results of experts, sent to the experts."""
    for hop in _hops(rank):
        yield from _send_rows(rank, hop)


def _send_rows(rank: _LedgerRank, hop: _Hop) -> Iterator[CollectiveCalls]:
    """Rows sent to experts. In fp8 there is also a scale for each tile."""
    hidden = rank.job.model.hidden
    if not rank.job.precision.float8_dispatch:
        yield from hop.send(rank.share.element * hidden)
        return
    yield from (*hop.send(hidden), *hop.send(FLOAT32 * -(-hidden // TILE)))


# Scales of fp8.


def _shares_activation_scales(job: JobSpec) -> bool:
    facts = job.precision.float8_facts
    return facts is not None and facts.shares_activation_scales


def _matrices_on_tp(job: JobSpec, operator: LayerOperator, kind: str) -> list[Matrix]:
    """The matrices of a layer's operator that several ranks of tp share."""
    plan = job.plan
    return [
        matrix
        for matrix in (_cut_matrices(operator) if is_layer(kind) else ())
        if (plan.expert_tp_size if matrix.experts else plan.tp) > 1
    ]


def _cut_matrices(operator: LayerOperator) -> list[Matrix]:
    """The matrices of an operator that tp may cut: only their products may be in fp8."""
    return [product.matrix for product in operator.products if product.matrix.sharded_dim is not None]


def _largest_values(rank: _LedgerRank, matrix: Matrix) -> Iterator[CollectiveCalls]:
    """All-reduces of the largest values of the operand of a product that tp cuts: one for the operand, for each expert,
    or for each row."""
    facts = rank.job.precision.float8_facts
    by_row = facts is not None and facts.activation == "row"
    numbers = rank.tokens if by_row else 1
    if matrix.experts:
        numbers = _hops(rank)[-1].arrived if by_row else matrix.experts // rank.job.plan.ep
    yield CollectiveCalls("all_reduce", "tp", 1, FLOAT32 * numbers)


def cast_collectives(job: JobSpec, kind: str, of_experts: bool) -> Collectives:
    """The collectives to cast a layer's weights to fp8, those of its experts or the others: the largest value of each
    weight, or of each of its rows in the direction that tp cuts. One cast serves both products with the weight."""
    facts, collectives = job.precision.float8_facts, list[CollectiveCalls]()
    if facts is None or not facts.shares_weight_scales:
        return ()
    operators = piece_operators(shape_of(job.model), kind)
    matrices = [matrix for operator in operators for matrix in _matrices_on_tp(job, operator, kind)]
    for matrix in (m for m in matrices if bool(m.experts) == of_experts):
        rows = matrix.columns if matrix.is_row_parallel else matrix.inner
        numbers = rows if facts.weight == "row" else 1
        num_experts = max(1, matrix.experts // job.plan.ep)
        collectives.append(CollectiveCalls("all_reduce", "tp", num_experts, num_experts * FLOAT32 * numbers))
    return tuple(collectives)


def num_float8_matrices(job: JobSpec, kind: str, of_experts: bool = False) -> int:
    """The number of matrices of a layer, on one rank, whose products may be in fp8: common ones, or of its experts."""
    matrices = [matrix for operator in piece_operators(shape_of(job.model), kind) for matrix in _cut_matrices(operator)]
    return sum(max(1, matrix.experts // job.plan.ep) for matrix in matrices if bool(matrix.experts) == of_experts)


_Overlay = dict[str, Callable[[_LedgerRank], Iterator[CollectiveCalls]]]
_FORWARD: _Overlay = {
    "rotary": _squares,
    "router": _gathers,
    "experts enter": _choices,
    "dispatch": _dispatched,
    "combine": _returned,
}
_BACKWARD: _Overlay = {
    "head": _loss,
    "rotary": _squares,
    "experts enter": _gradients_of_weights,
    "dispatch": _dispatched_back,
    "combine": _returned_back,
}
