"""The tensors that this runtime keeps for the backward, and the bytes of each on one rank.

Tensors that one operator gives to the next are in layers/layer_tensors.py. Those inside an operator are here: a class
for each part of a layer, which names the modules of model/ that make them. Which of them a layer keeps is in
attention_activations.py, moe_activations.py and activations.py. A test compares their sum with the tensors that
autograd saves, to the byte.

Sizes are whole numbers, or arrays of them if the numbers of a job's plan are arrays with one entry a plan. A condition
on arrays must be the same for all plans (`holds`). Nothing here needs numpy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import shape_of
from shardwright.layers.layer_tensors import (
    ATTENTION,
    BLOCK,
    ENDS,
    LATENT,
    MLP,
    ROUTING,
    SHARED_MLP,
    LabelledTensor,
    LayerTensor,
    TensorSizes,
)

FLOAT32, INT32, INT64, BOOL = 4, 4, 8, 1

Bytes = Any  # a whole number, or an array of them
TensorBytes = dict[LabelledTensor, Bytes]
Tensors = tuple[LabelledTensor, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of one microbatch in one layer: `sent` from this rank, and `arrived` at its experts; and the number of
    `choices` of each token that the routing has room for."""

    sent: Bytes
    arrived: Bytes
    choices: int


NO_ROWS = Rows(0, 0, 0)


@dataclass(frozen=True)
class Share:
    """A rank's share of a microbatch of a job, from which the bytes of its tensors follow: `tensors` has the number of
    elements of each."""

    job: JobSpec
    tensors: TensorSizes
    rows: Rows = NO_ROWS

    @classmethod
    def of(cls, job: JobSpec, rows: Rows = NO_ROWS) -> "Share":
        """The share of any rank of a job, with its rows for experts."""
        plan, tokens = job.plan, job.tokens_within * job.plan.microbatch_size
        tokens_here = tokens // plan.tp if plan.sequence_parallel else tokens
        tensors = TensorSizes(
            shape_of(job.model),
            tp=plan.tp,
            expert_tp=plan.expert_tp_size,
            tokens=tokens,
            tokens_here=tokens_here,
            routed=tokens_here,
            sent=rows.sent,
            arrived=rows.arrived,
        )
        return cls(job, tensors, rows)

    def __getitem__(self, tensor: LabelledTensor) -> Bytes:
        """Bytes of a tensor. Tensors of casts to fp8 follow from a product (cast_inputs.py)."""
        if isinstance(tensor, InnerTensor):
            return tensor.num_bytes(self)
        assert isinstance(tensor, LayerTensor), f"{tensor.label} has no formula of its size"
        return (tensor.element_bytes or self.element) * tensor.elements(self.tensors)

    def bytes_of(self, tensors: Iterable[LabelledTensor]) -> TensorBytes:
        """Bytes of some tensors, by tensor."""
        return {tensor: self[tensor] for tensor in tensors}

    @cached_property
    def element(self) -> int:
        """Bytes of a number of the model's number type."""
        return self.job.precision.compute_bytes

    @cached_property
    def is_rmsnorm(self) -> bool:
        """True if the model's norms are RMSNorms, False if they are LayerNorms."""
        return self.job.model.norm == "rmsnorm"

    @property
    def tokens_sent(self) -> Bytes:
        """The number of tokens of a microbatch that a rank sends to experts: its own, or those of its tp line."""
        is_whole = holds(self.job.plan.expert_tp_size == self.job.plan.tp)
        return self.tensors.tokens if is_whole else self.tensors.tokens_here

    def statistics(self, rows: Bytes) -> Bytes:
        """The bytes that a norm of `rows` vectors keeps besides its input.

        RMSNorm keeps 1 / rms in float32; LayerNorm keeps mean and 1 / deviation, in the number type of x on a CPU.
        """
        return FLOAT32 * rows if self.is_rmsnorm else 2 * self.element * rows


@dataclass(frozen=True, eq=False)
class InnerTensor(LabelledTensor):
    """A tensor that an operator of this runtime keeps, and that no other operator takes. `num_bytes` computes its bytes
    on one rank."""

    num_bytes: Callable[[Share], Bytes]


# The tensors inside operators.


def _stream_statistics(share: Share) -> Bytes:
    """Bytes that a norm of the residual stream keeps besides its input."""
    return share.statistics(share.tensors.tokens_here)


def _qkv_bytes(share: Share) -> Bytes:
    return share[ATTENTION.qkv]


def _attended_bytes(share: Share) -> Bytes:
    return share[ATTENTION.attended]


@dataclass(frozen=True)
class HeadCounts:
    """The tokens on which a rank's attention core computes, and its query and key/value heads."""

    tokens: Bytes
    heads: Bytes
    kv_heads: Bytes

    @classmethod
    def of(cls, share: Share) -> "HeadCounts":
        """The rank's tokens and all its heads, or all tokens and a part of the heads (Ulysses)."""
        plan, tokens, heads = share.job.plan, share.tensors.tokens, share.tensors.heads
        kv_heads = share.job.model.num_kv_heads // plan.tp
        if plan.trades_heads:
            return cls(tokens * plan.cp, heads // plan.cp, most(1, kv_heads // plan.cp))
        return cls(tokens, heads, kv_heads)


def _traded_bytes(share: Share) -> Bytes:
    counts = HeadCounts.of(share)
    return share.element * counts.tokens * (counts.heads + 2 * counts.kv_heads) * share.job.model.head_size


def _key_bytes(share: Share) -> Bytes:
    counts = HeadCounts.of(share)
    return share.element * counts.tokens * counts.kv_heads * share.job.model.head_size


def _head_statistics(share: Share) -> Bytes:
    counts = HeadCounts.of(share)
    per_head = FLOAT32 if share.job.model.qk_norm == "l2" else share.statistics(1)
    return per_head * counts.tokens * (counts.heads + counts.kv_heads)


@dataclass(frozen=True)
class InnerAttention:
    """Attention with grouped queries (model/attention.py, model/head_norms.py), and the norms around any attention."""

    norm_statistics: InnerTensor = InnerTensor("attention statistics", _stream_statistics)
    out_norm_statistics: InnerTensor = InnerTensor("attention out statistics", _stream_statistics)
    biased_qkv: InnerTensor = InnerTensor("biased qkv", _qkv_bytes)
    all_heads_norm_out: InnerTensor = InnerTensor("normal qkv", _qkv_bytes)
    all_heads_statistics: InnerTensor = InnerTensor(
        "statistics of all heads", lambda share: 2 * FLOAT32 * share.tensors.tokens
    )
    clipped_qkv: InnerTensor = InnerTensor("clipped qkv", _qkv_bytes)
    traded_qkv: InnerTensor = InnerTensor("traded qkv", _traded_bytes)
    head_statistics: InnerTensor = InnerTensor("head statistics", _head_statistics)
    turned_query: InnerTensor = InnerTensor("turned query", _attended_bytes)
    turned_key: InnerTensor = InnerTensor("turned key", _key_bytes)
    query: InnerTensor = InnerTensor("query", _attended_bytes)
    key: InnerTensor = InnerTensor("key", _key_bytes)
    value: InnerTensor = InnerTensor("value", _key_bytes)
    attended_before_trade: InnerTensor = InnerTensor("attended before trade", _attended_bytes)


@dataclass(frozen=True)
class InnerLatent:
    """Latent attention (model/latent_attention.py). Values are padded to the width of a key; so is the result of
    attention, which is copied without the padding."""

    statistics: InnerTensor = InnerTensor(
        "latent statistics",
        lambda share: share.statistics(share.tensors.latent_tokens) * (2 if share.job.model.latent.q_rank > 0 else 1),
    )
    latents_norm_out: InnerTensor = InnerTensor("normal latents", lambda share: share[LATENT.latents])
    key_latent: InnerTensor = InnerTensor("keys' latent", lambda share: share[LATENT.key_latent_norm_out])
    key: InnerTensor = InnerTensor("key", lambda share: share[LATENT.query])
    value: InnerTensor = InnerTensor("value", lambda share: share[LATENT.query])
    padded_attended: InnerTensor = InnerTensor(
        "padded attended",
        lambda share: share[LATENT.query] if share.job.model.value_width < share.job.model.query_width else 0,
    )


@dataclass(frozen=True)
class InnerMlp:
    """An MLP (model/mlp.py) and the norms around the second half of a layer."""

    norm_statistics: InnerTensor = InnerTensor("mlp statistics", _stream_statistics)
    out_norm_statistics: InnerTensor = InnerTensor("mlp out statistics", _stream_statistics)
    biased_up: InnerTensor = InnerTensor("biased up", lambda share: share[MLP.up])
    biased_shared_up: InnerTensor = InnerTensor("biased shared up", lambda share: share[SHARED_MLP.up])


def _by_choice(share: Share, number_bytes: int) -> Bytes:
    return number_bytes * share.tensors.tokens_here * share.rows.choices


def _expert_shares(share: Share) -> Bytes:
    """One number for each expert, or for each expert and sequence."""
    moe = share.job.model.moe
    return FLOAT32 * moe.experts * (share.job.plan.microbatch_size if moe.aux_scope == "sequence" else 1)


def _trip_bytes(share: Share) -> Bytes:
    """Indices of the rows of both permutations, and of the rows that come from other ranks."""
    plan, num_experts = share.job.plan, share.job.model.moe.experts
    is_moved = (plan.ep > 1) & (num_experts > plan.ep)
    return INT64 * (2 * (share.tokens_sent * share.rows.choices) + share.rows.arrived * is_moved)


@dataclass(frozen=True)
class InnerRouting:
    """The router and its losses (model/router.py, model/gates), and tokens on their way to experts
    (model/moe_block.py)."""

    scores: InnerTensor = InnerTensor("scores", lambda share: share[ROUTING.logits])
    sum_of_scores: InnerTensor = InnerTensor("sum of scores", lambda share: FLOAT32 * share.tensors.tokens_here)
    logits_log_sum_exp: InnerTensor = InnerTensor(
        "log-sum-exp of logits", lambda share: FLOAT32 * share.tensors.tokens_here
    )
    choices: InnerTensor = InnerTensor("choices", lambda share: _by_choice(share, INT64))
    plain_weights: InnerTensor = InnerTensor("plain weights", lambda share: _by_choice(share, FLOAT32))
    sum_of_weights: InnerTensor = InnerTensor("sum of weights", lambda share: FLOAT32 * share.tensors.tokens_here)
    expert_shares: InnerTensor = InnerTensor("shares", _expert_shares)
    arrived_weights: InnerTensor = InnerTensor("arrived weights", lambda share: FLOAT32 * share.rows.arrived)
    trip: InnerTensor = InnerTensor("trip", _trip_bytes)
    shared_gate: InnerTensor = InnerTensor(
        "shared gate",
        lambda share: (share.element + (FLOAT32 if share.element != FLOAT32 else 0)) * share.tensors.tokens_here,
    )


def _row_bytes(share: Share) -> Bytes:
    """Ids of a rank's tokens, if it picks its part of them; else of all."""
    job = share.job
    if holds(job.plan.tp > 1) or (holds(job.plan.cp > 1) and not job.plan.trades_heads):
        return INT64 * share.tensors.tokens
    return INT64 * job.model.sequence * job.plan.microbatch_size


def _temperature_bytes(share: Share) -> Bytes:
    tokens = share.job.model.sequence if share.job.plan.trades_heads else share.job.tokens_within
    return FLOAT32 * tokens * share.job.plan.microbatch_size


def _position_bytes(share: Share) -> Bytes:
    is_by_sample = share.job.data.separate_documents
    return INT64 * share.job.tokens_within * (share.job.plan.microbatch_size if is_by_sample else 1)


def _further_bytes(share: Share) -> Bytes:
    """Each further token has its own norm and loss, whose last targets never count."""
    loss = (INT64 + BOOL) * share.tensors.tokens
    return share.job.model.mtp_layers * (_stream_statistics(share) + share[ENDS.final_norm_out] + loss)


@dataclass(frozen=True)
class InnerEnds:
    """Before and after the layers: model/embedding.py, model/loss.py, model/mtp.py and the marks of documents."""

    documents: InnerTensor = InnerTensor(
        "documents", lambda share: INT32 * share.job.model.sequence * share.job.plan.microbatch_size
    )
    chunks: InnerTensor = InnerTensor(
        "chunks", lambda share: INT32 * share.job.model.sequence * share.job.plan.microbatch_size
    )
    temperatures: InnerTensor = InnerTensor("temperatures", _temperature_bytes)
    rows: InnerTensor = InnerTensor("rows", _row_bytes)
    rows_elsewhere: InnerTensor = InnerTensor("rows elsewhere", lambda share: BOOL * share.tensors.tokens)
    positions: InnerTensor = InnerTensor("positions", _position_bytes)
    embedding_statistics: InnerTensor = InnerTensor("embedding statistics", _stream_statistics)
    joined_statistics: InnerTensor = InnerTensor("statistics", lambda share: 2 * _stream_statistics(share))
    hidden_states: InnerTensor = InnerTensor("hidden states", lambda share: share[BLOCK.input])
    final_statistics: InnerTensor = InnerTensor("final statistics", _stream_statistics)
    targets: InnerTensor = InnerTensor("targets", lambda share: INT64 * share.tensors.tokens)
    uncounted: InnerTensor = InnerTensor("targets that do not count", lambda share: BOOL * share.tensors.tokens)
    further_tokens: InnerTensor = InnerTensor("further tokens", _further_bytes)


IN_ATTENTION = InnerAttention()
IN_LATENT = InnerLatent()
IN_MLP = InnerMlp()
IN_ROUTING = InnerRouting()
IN_ENDS = InnerEnds()


@lru_cache(maxsize=256)
def input_of_ups(name: str, matrix: Matrix) -> InnerTensor:
    """The input of B of the adapters of the matrix of an operator, for all its maps (parallel/tensor/low_rank.py): for
    all tokens, or for the rows of experts that have a matrix each."""

    def num_bytes(share: Share) -> Bytes:
        adapter = share.job.model.adapter
        rows = share.rows.arrived if matrix.experts else share.tensors.tokens
        return share.element * rows * adapter.rank * len(adapter.targets_of(matrix))

    return InnerTensor(f"input of B of the adapters of {name}", num_bytes)
