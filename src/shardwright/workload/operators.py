"""The operators of one training step on one rank: shapes, FLOPs, bytes moved and kept, collectives by axis.

One function an operator, each for one microbatch on one rank. A layer is a list of them (layers.py). What the kernels
of a generation of software read and write comes from its description (config/software.py).

Letters: T tokens of a microbatch on a rank (sequence / cp x microbatch size), H hidden, t tensor-parallel degree, N and
G query and key/value heads, D head width, F inner width of the MLP, V vocabulary. Sizes are bytes. Every number may be
an array with one entry a plan; so an exchange that only some plans have is there for all, of no bytes for the others.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from shardwright.config.model_shape import Matrix, ModelShape
from shardwright.config.software import SoftwareSpec
from shardwright.workload.arrays import Numbers
from shardwright.workload.query import PlanGrid

HALF, FLOAT32 = 2, 4

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"]
Axis = Literal["tp", "cp", "ep"]


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` products of (rows x inner) with (inner x columns). `weight`: the second factor is a parameter."""

    rows: Numbers
    inner: Numbers
    columns: Numbers
    batch: Numbers = 1
    weight: bool = True

    @classmethod
    def of(cls, rows: Numbers, matrix: Matrix, tp: Numbers, batch: Numbers = 1) -> "MatrixProduct":
        """Rows times the part of a weight that each of `tp` ranks has."""
        return cls(rows, *matrix.on_rank(tp), batch)

    @property
    def flops(self) -> Numbers:
        """FLOPs of the forward; the backward takes twice as many."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns

    @property
    def elements(self) -> Numbers:
        """That the forward reads and writes."""
        return self.batch * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)


@dataclass(frozen=True)
class Scores:
    """Attention of one kernel: `pairs` of a query with a key that it sees, summed over heads and sequences.

    `length` is the number of keys of a sequence, for kernels are slower on short ones; `width` a query's elements plus
    a value's.
    """

    pairs: Numbers
    length: Numbers
    width: int

    @property
    def flops(self) -> Numbers:
        """FLOPs of the forward; the backward takes 2.5 times as many, for it computes the scores again."""
        return 2.0 * self.pairs * self.width


@dataclass(frozen=True)
class Exchange:
    """A collective: `size` is the bytes of the full tensor that it is about, as in the ledger; 0 is none.

    `is_hidden`: it runs beside the product of its operator's neighbour, whatever the software.
    """

    kind: Kind
    axis: Axis
    size: Numbers
    is_hidden: bool = False

    def counted(self, num_ranks: int) -> float:
        """Bytes that a rank's ledger counts in one plan: around a ring it passes on what the other ranks have."""
        return float(self.size * ((num_ranks - 1) / num_ranks if self.kind == "ring" else 1))


@dataclass(frozen=True)
class Operator:
    """One operator. `forward_bytes` and `backward_bytes` are elementwise traffic; products' and scores' is their own.

    `kept` is what it keeps for its backward, and `kept_result` the part of it that a policy which keeps what products
    and attention give (`matmul`) still keeps. `given` is its result, and `inside` what its backward needs beside what
    was kept and the gradients of its result and of what it takes. Of what it kept, its result is for the backward of
    the operator behind it, unless its own needs it (`needs_kept`).
    """

    name: str
    products: tuple[MatrixProduct, ...] = ()
    scores: Scores | None = None
    forward_bytes: Numbers = 0.0
    backward_bytes: Numbers = 0.0
    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()
    kept: Numbers = 0.0
    kept_result: Numbers = 0.0
    given: Numbers = 0.0
    inside: Numbers = 0.0
    needs_kept: bool = False

    @property
    def freed(self) -> Numbers:
        """Bytes of what it kept that are free when its own backward begins."""
        return 0.0 if self.needs_kept else np.minimum(self.kept, self.given)

    @property
    def flops(self) -> Numbers:
        """FLOPs of the forward."""
        return sum(p.flops for p in self.products) + (self.scores.flops if self.scores else 0.0)

    def in_numbers_of(self, element_bytes: int) -> "Operator":
        """The operator where a number takes not 2 bytes but more: what is moved, kept and exchanged grows alike."""
        more = element_bytes / HALF
        return replace(
            self, forward_bytes=more * self.forward_bytes, backward_bytes=more * self.backward_bytes,
            forward=tuple(replace(e, size=more * e.size) for e in self.forward),
            backward=tuple(replace(e, size=more * e.size) for e in self.backward),
            kept=more * self.kept, kept_result=more * self.kept_result, given=more * self.given,
            inside=more * self.inside,
        )  # fmt: skip


@dataclass(frozen=True)
class Context:
    """What every operator's function takes: the model, the plan and the software, and sizes that follow from them."""

    shape: ModelShape
    cut: PlanGrid
    software: SoftwareSpec

    @cached_property
    def tokens(self) -> Numbers:
        """T."""
        return self.shape.sequence / self.cut.cp * self.cut.microbatch

    @cached_property
    def residual(self) -> Numbers:
        """Elements of the residual stream on a rank."""
        return self.tokens * self.shape.hidden / np.where(self.cut.sequence_parallel, self.cut.tp, 1)

    @cached_property
    def own(self) -> Numbers:
        """Tokens of the residual stream on a rank."""
        return self.tokens / np.where(self.cut.sequence_parallel, self.cut.tp, 1)

    @cached_property
    def stream(self) -> Numbers:
        """Bytes of the residual stream on a rank."""
        return HALF * self.residual

    @cached_property
    def whole(self) -> Numbers:
        """Bytes of the residual stream as products read it, whole along what tp ranks share of the sequence."""
        return HALF * self.tokens * self.shape.hidden

    @cached_property
    def gathered(self) -> Numbers:
        """Bytes of the same where it is gathered for a product and again for its weight gradient."""
        return self.whole * (self.scattered > 0)

    @cached_property
    def summed(self) -> Numbers:
        """Bytes of what tp ranks sum: the residual stream in full, where it is summed for all of them."""
        return self._between * (1 - np.asarray(self.cut.sequence_parallel))

    @cached_property
    def scattered(self) -> Numbers:
        """Bytes of the same where it is scattered among them and gathered again (sequence parallel)."""
        return self._between * np.asarray(self.cut.sequence_parallel)

    @cached_property
    def _between(self) -> Numbers:
        return self.whole * (self.cut.tp > 1)


def norm(c: Context, name: str) -> Operator:
    """Layernorm or RMSNorm of the residual stream."""
    n, s = c.residual, c.software
    return Operator(name, (), None, n * s.norm[0], n * s.norm[1], kept=n * s.norm_kept, given=c.stream, needs_kept=True)


def enter(c: Context, name: str) -> Operator:
    """The sharded rows come together before a column-parallel product: f of Megatron-LM, or its gather under sp.

    Backward: the sum of the input gradients, or its scatter; under sp also the gather of the saved input again
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). What is kept is the product's input.
    """
    forward, backward = _gathered(c, 1.0)
    return Operator(name, forward=forward, backward=backward, kept=c.stream, given=c.whole)


def enter_alone(c: Context, name: str) -> Operator:
    """What enters a product that each rank makes of its own rows: nothing comes together."""
    return Operator(name, kept=c.stream, given=c.stream)


def _gathered(c: Context, share: float) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What tp ranks exchange around column-parallel products, forward and backward, if the input has a `share` of the
    residual stream's width."""
    whole, parts = (
        Exchange("all_reduce", "tp", share * c.summed), Exchange("reduce_scatter", "tp", share * c.scattered)
    )  # fmt: skip
    # The saved input comes back while the input gradient is computed.
    again = Exchange("all_gather", "tp", share * c.scattered, is_hidden=True)
    return (Exchange("all_gather", "tp", share * c.scattered),), (whole, parts, again)


def leave(c: Context, name: str) -> Operator:
    """The partial sums of a row-parallel product come together: g of Megatron-LM, or its scatter under sp."""
    whole, parts = Exchange("all_reduce", "tp", c.summed), Exchange("reduce_scatter", "tp", c.scattered)
    back = Exchange("all_gather", "tp", c.scattered)
    return Operator(name, forward=(whole, parts), backward=(back,), given=c.stream)


def queries_keys_values(c: Context) -> Operator:
    """One product for query, key and value; keeps what it gives."""
    qkv, _ = c.shape.attention_matrices
    product = MatrixProduct.of(c.tokens, qkv, c.cut.tp)
    kept = HALF * c.tokens * product.columns
    return Operator("qkv", (product,), kept=kept, kept_result=kept, given=kept, inside=c.gathered)


def latents(c: Context) -> Operator:
    """The small vectors that heads are made from, by each tp rank for its own rows.

    Without low-rank queries the same gather brings the rows for the queries, and each rank makes the latents of all.
    """
    m, (down, q_up, *_) = c.shape.latent, c.shape.attention_matrices
    assert m is not None, "only latent attention has latents"
    rows = c.own if m.query_rank else c.tokens
    of_keys = MatrixProduct(rows, down.inner, down.columns - m.query_rank)
    of_queries = MatrixProduct.of(rows, q_up, c.cut.tp)
    if m.query_rank:
        of_queries = MatrixProduct(rows, down.inner, m.query_rank)
    products = (of_queries, of_keys)
    kept, given = HALF * rows * down.columns, HALF * rows * (of_queries.columns + of_keys.columns)
    inside = 0.0 if m.query_rank else c.gathered
    return Operator("qkv", products, kept=kept, kept_result=kept, given=given, inside=inside)


def heads_of_latents(c: Context) -> Operator:
    """Norms of the latents, and the products that make query, key and value of a rank's heads.

    With low-rank queries the latents are what tp ranks gather, and whose gradients they sum (model/latent_attention.py;
    so does Megatron-core, whose down projections are duplicated).
    """
    s, t, m = c.shape, c.cut.tp, c.shape.latent
    assert m is not None, "only latent attention has latents"
    _, q_up, kv_up, _ = s.attention_matrices
    products = tuple(MatrixProduct.of(c.tokens, of, t) for of in ((q_up, kv_up) if m.query_rank else (kv_up,)))
    rows = c.own if m.query_rank else c.tokens
    low = m.query_rank + m.key_rank
    traffic = rows * ((2 * low + m.rotary) * (c.software.norm[0] + HALF))
    given = HALF * c.tokens * (s.heads // t) * (2 * s.query_width + s.value_width)
    kept = HALF * rows * low + given
    narrow = (low + m.rotary) / s.hidden if m.query_rank else 0.0
    forward, backward = _gathered(c, narrow)
    return Operator(
        "heads", products, None, traffic, 2 * traffic, forward, backward, kept, kept, given, narrow * c.gathered
    )  # fmt: skip


def rotate(c: Context) -> Operator:
    """Rotary positions, and the copies that bring heads into their order."""
    s, w = c.shape, c.software
    width = s.head_dim * (s.heads + 2 * s.kv_heads)
    if s.latent:
        width = s.heads * (2 * s.query_width + s.value_width)
    n = c.tokens * width / c.cut.tp
    return Operator("rotary", (), None, n * w.rotary[0], n * w.rotary[1], kept=n * w.rotary_kept, given=HALF * n)


def attention(c: Context) -> Operator:
    """The attention core: one kernel, or two products with a softmax between that keeps the scores.

    Under cp with "ulysses" a rank has a share of the heads for all tokens, else all of them for a share of the queries.
    """
    s, cut, w = c.shape, c.cut, c.software
    heads = np.maximum(1, s.heads // cut.tp)
    per_query, per_value = s.query_width, s.value_width
    queries = s.sequence // cut.cp
    given = HALF * c.tokens * heads * per_value
    ahead, back = _keys_to_queries(c, heads, per_query)
    if w.attention in ("torch", "softmax"):
        batch, n = heads * cut.microbatch, 1.0 * heads * cut.microbatch * queries * s.sequence
        if cut.cp_method == "ulysses":
            batch, queries = np.maximum(1, batch // cut.cp), s.sequence
        products = (
            MatrixProduct(queries, per_query, s.sequence, batch, weight=False),
            MatrixProduct(queries, s.sequence, per_value, batch, weight=False),
        )
        # What the softmax gives, and with torch's, which computes in float32, its copy in 16 bits; with dropout the
        # mask and what it leaves. Backward: the gradients on both sides of the softmax.
        per_score = 5 if w.dropout else HALF if w.attention == "softmax" else FLOAT32 + HALF
        inside = 2 * n * (HALF if w.attention == "softmax" else FLOAT32)
        return Operator(
            "attention", products, None, n * w.softmax[0], n * w.softmax[1], ahead, back, n * per_score + given, given,
            given, inside,
        )  # fmt: skip
    seen = 0.5 if w.causal else 1.0
    pairs = seen * heads * c.tokens * s.sequence
    scores = Scores(pairs, queries if cut.cp_method == "ring" else s.sequence, per_query + per_value)
    kept = given + FLOAT32 * c.tokens * heads
    inside = FLOAT32 * c.tokens * heads * per_query  # the gradient of queries is added up in float32
    return Operator("attention", (), scores, 0.0, 0.0, ahead, back, kept, kept, given, inside, needs_kept=True)


def _keys_to_queries(c: Context, heads: Numbers, width: int) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What cp ranks exchange around attention, forward and backward.

    ring (Liu et al. 2023, arXiv 2310.01889): keys and values go round, in the backward with their gradients.
    all-gather (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2): they are gathered, in the backward again, and their
    gradients scattered. ulysses (Jacobs et al. 2023, arXiv 2309.14509): tokens are traded for heads and back; fewer
    key/value heads than cp ranks are repeated. A latent's values travel as wide as its keys, `width` elements, for
    kernels have them padded.
    """
    s, cut = c.shape, c.cut
    kv_heads, is_cut = np.maximum(1, s.kv_heads // cut.tp), cut.cp > 1
    kv = HALF * c.tokens * kv_heads * 2 * width * cut.cp * is_cut
    if cut.cp_method == "ring":
        return (Exchange("ring", "cp", kv),), (Exchange("ring", "cp", 2 * kv),)
    if cut.cp_method == "all-gather":
        gather = Exchange("all_gather", "cp", kv)
        return (gather,), (gather, Exchange("reduce_scatter", "cp", kv))
    per_token = (heads + 2 * np.maximum(kv_heads, cut.cp)) * width
    there = Exchange("all_to_all", "cp", HALF * c.tokens * per_token * is_cut)
    back = Exchange("all_to_all", "cp", HALF * c.tokens * heads * width * is_cut)
    return (there, back), (back, there)


def output(c: Context) -> Operator:
    """The product that joins the heads; its input is what attention keeps."""
    return Operator("out", (MatrixProduct.of(c.tokens, c.shape.attention_matrices[-1], c.cut.tp),), given=c.whole)


def join(c: Context, name: str) -> Operator:
    """Bias, dropout and the sum with the residual stream."""
    n, w = c.residual, c.software
    kept = n if w.dropout else 0.0
    return Operator(name, (), None, n * w.residual[0], n * w.residual[1], kept=kept, given=c.stream, needs_kept=True)


def mlp(
    c: Context, ffn: int, rows: Numbers | None = None, batch: Numbers = 1, tp: Numbers | None = None
) -> list[Operator]:
    """Up (and gate), activation, down. `rows` tokens by each of `batch` experts, where it is not T by one."""
    s, w, t = c.shape, c.software, c.cut.tp if tp is None else tp
    is_dense = rows is None
    rows = c.tokens if rows is None else rows
    up, down = (MatrixProduct.of(rows, matrix, t, batch) for matrix in s.mlp_matrices(ffn))
    n = rows * batch * down.inner
    up_kept = HALF * s.gates * n
    # The bytes of an activation are of one with a gate: without, one tensor less is read, and one less written.
    plain = 1.0 if s.gated else 2 / 3
    return [
        Operator(
            "up", (up,), kept=up_kept, kept_result=up_kept, given=up_kept, inside=c.gathered if is_dense else 0.0,
        ),
        Operator(
            "activation", (), None, plain * n * (w.activation[0] + HALF), plain * n * (w.activation[1] + HALF),
            kept=n * (HALF + w.activation_kept), given=HALF * n,
        ),
        Operator("down", (down,), given=HALF * rows * batch * s.hidden),
    ]  # fmt: skip
