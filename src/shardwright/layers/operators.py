"""The operators of one training step on one rank: shapes, FLOPs, bytes moved and kept, collectives by axis.

layer_operators.py lists the operators with the tensors that they take and give. This file has a function for each kind,
for one microbatch on one rank; attention_operators.py, expert_operators.py and embedding_head.py have the others. The
description of a software generation (config/software.py) says what its kernels read, write and keep.

Letters: T tokens of a microbatch on a rank (sequence / cp x microbatch size), H hidden, t tensor-parallel degree, N and
G query and key/value heads, D head width, F inner width of the MLP, V vocabulary. Sizes are bytes. Every number may be
an array with one entry per plan; so an exchange that only some plans have exists for all, with 0 bytes for the others.
"""

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from shardwright.config.elementwise_kernels import activation_traffic, drops_apart, norm_traffic, residual_traffic
from shardwright.config.matrix import Matrix
from shardwright.config.measured_table import Kernel
from shardwright.config.model_shape import ModelShape
from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Numbers
from shardwright.layers.kept_inputs import between_bytes, input_bytes, norm_kept, num_entries, num_kept_inputs
from shardwright.layers.layer_operators import LayerOperator, RecomputeUnit
from shardwright.layers.layer_tensors import BLOCK, HALF, LayerTensor, TensorSizes
from shardwright.layers.query import PlanGrid

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"]
Axis = Literal["tp", "cp", "ep"]


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` products of (rows x inner) with (inner x columns). `weight`: the second factor is a parameter, which has
    no gradient if it `is_frozen`; in NF4 an element takes `nf4_bytes`, and is made a number in each pass. It `is_wide`
    if it is in 16 bits where other products are in fp8."""

    rows: Numbers
    inner: Numbers
    columns: Numbers
    batch: Numbers = 1
    weight: bool = True
    is_frozen: bool = False
    is_wide: bool = False
    nf4_bytes: float = 0.0

    @classmethod
    def of(cls, rows: Numbers, matrix: Matrix, tp: Numbers, batch: Numbers = 1) -> "MatrixProduct":
        """The product of rows with the part of a weight that each of `tp` ranks has."""
        return cls(rows, matrix.inner_on(tp), matrix.columns_on(tp), batch)

    @property
    def flops(self) -> Numbers:
        """FLOPs of the forward; the backward takes twice as many, or as many if the weight is frozen."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns

    @property
    def elements(self) -> Numbers:
        """Elements that the forward reads and writes."""
        return self.batch * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)


@dataclass(frozen=True)
class Scores:
    """Attention of one kernel: `pairs` of a query with a key that it computes, summed over heads and sequences.

    `length` is the number of keys of a sequence, because kernels are slower on short sequences; `width` is the elements
    of a query plus those of a value. The backward computes `unseen` pairs more, beyond a window.
    """

    pairs: Numbers
    length: Numbers
    width: int
    unseen: Numbers = 0.0

    @property
    def flops(self) -> Numbers:
        """FLOPs of the forward; the backward takes 2.5 times as many, because it computes the scores again."""
        return 2.0 * self.pairs * self.width


@dataclass(frozen=True)
class Exchange:
    """A collective: `size` is the bytes of its full tensor, as in the ledger; 0 is no collective.

    `is_hidden`: it runs in parallel with the product of the neighbouring operator, with any software. `beside_weights`:
    it runs in parallel with that product's weight gradient, if the software does so; a schedule may postpone the weight
    gradient (`is_put_off`). A ring takes `rounds` rounds, of `size` bytes together.
    """

    kind: Kind
    axis: Axis
    size: Numbers
    is_hidden: bool = False
    beside_weights: bool = False
    is_put_off: bool = True
    rounds: int = 1


Exchanges = tuple[tuple[Exchange, ...], tuple[Exchange, ...]]  # (of the forward, of the backward)


@dataclass(frozen=True)
class Operator:
    """The costs of an operator. `forward_bytes` and `backward_bytes` are elementwise traffic; products and scores have
    their own.

    `kept` is the bytes kept for its backward: of its result or, if it `keeps_input`, of its input; `kept_result` is the
    part that attention still keeps under policies that drop its scores. `given` is the bytes of its result. `inside` is
    the bytes that its backward needs in addition to the kept bytes and the gradients of its result and its input. The
    kept result is free when its own backward begins, because only the next operator's backward reads it, unless its own
    backward reads it too (`needs_kept`). An operator that is computed `in_backward` takes no time in the forward, and
    postpones nothing to the weight gradients.

    `kernel` is its elementwise computation if that can be measured, and `elements` the number of its elements.
    """

    layer_operator: LayerOperator
    _: KW_ONLY
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
    keeps_input: bool = False
    in_backward: bool = False
    kernel: Kernel | None = None
    elements: Numbers = 0.0

    @property
    def name(self) -> str:
        """Its name in the list of operators."""
        return self.layer_operator.name

    @property
    def recompute_unit(self) -> RecomputeUnit:
        """The group of adjacent operators with which it is recomputed."""
        return self.layer_operator.recompute_unit

    @property
    def kept_tensor(self) -> LayerTensor:
        """The tensor that it keeps."""
        return self.layer_operator.takes if self.keeps_input else self.layer_operator.gives

    @property
    def freed(self) -> Numbers:
        """Bytes that it kept and that are free when its own backward begins."""
        return 0.0 if self.needs_kept else np.minimum(self.kept, self.given)

    @property
    def flops(self) -> Numbers:
        """FLOPs of the forward."""
        return sum(p.flops for p in self.products) + (self.scores.flops if self.scores else 0.0)

    def with_more_traffic(self, forward: Numbers, backward: Numbers) -> "Operator":
        """The operator with so many bytes of elementwise traffic more in the forward, and in the backward."""
        return replace(self, forward_bytes=self.forward_bytes + forward, backward_bytes=self.backward_bytes + backward)

    def in_numbers_of(self, element_bytes: int) -> "Operator":
        """The operator with elements of more than 2 bytes: moved, kept and exchanged bytes grow alike."""
        scale = element_bytes / HALF
        return replace(
            self,
            forward_bytes=scale * self.forward_bytes,
            backward_bytes=scale * self.backward_bytes,
            forward=tuple(replace(e, size=scale * e.size) for e in self.forward),
            backward=tuple(replace(e, size=scale * e.size) for e in self.backward),
            kept=scale * self.kept,
            kept_result=scale * self.kept_result,
            given=scale * self.given,
            inside=scale * self.inside,
        )


@dataclass(frozen=True)
class Context:
    """The arguments of every operator's function: the model, the plan and the software, the piece of the model, and
    sizes that follow from them."""

    shape: ModelShape
    grid: PlanGrid
    software: SoftwareSpec
    kind: str = "dense"

    @cached_property
    def tokens(self) -> Numbers:
        """T: tokens of a microbatch on a rank."""
        return self.shape.sequence / self.grid.cp * self.grid.microbatch

    @cached_property
    def sizes(self) -> TensorSizes:
        """Elements of tensors."""
        shape, grid, stream_ranks = self.shape, self.grid, np.where(self.grid.sequence_parallel, self.grid.tp, 1)
        sizes = TensorSizes(
            shape, tp=grid.tp, expert_tp=grid.expert_tp, tokens=self.tokens, tokens_here=self.tokens / stream_ranks
        )
        if shape.experts is None:
            return sizes
        # If experts are whole, tp ranks share the tokens, whether the residual stream is sharded or not.
        routed = self.tokens / np.where(grid.expert_tp == 1, grid.tp, stream_ranks)
        rows, num_experts = self.expert_rows
        return replace(sizes, routed=routed, sent=self.sent, arrived=rows * num_experts)

    def bias(self, elements: Numbers, is_there: bool) -> tuple[Numbers, Numbers]:
        """Bytes that the sum with a bias moves, forward and backward; 0 without a bias."""
        forward, backward = self.software.bias
        return (elements * forward, elements * backward) if is_there else (0.0, 0.0)

    @cached_property
    def sent(self) -> Numbers:
        """Rows that a rank sends to experts."""
        return self.tokens * self.grid.expert_tp / self.grid.tp * self.shape.mixture.topk

    @cached_property
    def expert_rows(self) -> tuple[Numbers, Numbers]:
        """(rows of each expert, experts of a rank): all experts get equally many rows."""
        num = self.shape.mixture.num
        return self.sent * self.grid.ep / num, np.maximum(1, num // self.grid.ep)

    def bytes_of(self, tensor: LayerTensor) -> Numbers:
        """Bytes of a tensor with 16 bits per element."""
        return HALF * self.sizes[tensor]

    @cached_property
    def whole(self) -> Numbers:
        """Bytes of the residual stream as products read it, whole even if tp ranks share the sequence."""
        return HALF * self.sizes.whole

    @cached_property
    def gathered(self) -> Numbers:
        """The bytes of `whole` if it is gathered for a product, and again for its weight gradient; else 0."""
        return self.whole * (self.scattered > 0) * self.software.gathers_again

    @cached_property
    def summed(self) -> Numbers:
        """Bytes that tp ranks sum: the whole residual stream, if every rank gets the sum; else 0."""
        return self._between * (1 - np.asarray(self.grid.sequence_parallel))

    @cached_property
    def scattered(self) -> Numbers:
        """Bytes of the residual stream if its sum is scattered among tp ranks and gathered again (sequence parallel);
        else 0."""
        return self._between * np.asarray(self.grid.sequence_parallel)

    @cached_property
    def entering(self) -> Exchanges:
        """The exchange of tp ranks around a column-parallel product of the residual stream."""
        return entering(self, 1.0)

    @cached_property
    def leaving(self) -> Exchanges:
        """The exchange of tp ranks around a row-parallel product that gives the residual stream."""
        return leaving(self, 1.0)

    @cached_property
    def _between(self) -> Numbers:
        return self.whole * (self.grid.tp > 1)


def norm(c: Context, o: LayerOperator) -> Operator:
    """Layernorm or RMSNorm of the residual stream. In a parallel block the second norm takes what the first keeps."""
    n = c.sizes[o.takes]
    traffic = norm_traffic(c.software.norm)
    forward, backward = traffic.layer if c.shape.layer_norm else traffic.rms
    kept = n * norm_kept(c.shape, c.software)
    return Operator(
        o,
        forward_bytes=n * forward,
        backward_bytes=n * backward,
        kept=0.0 if o.name == "mlp norm" and o.takes is BLOCK.input else kept,
        given=between_bytes(c.software) * c.sizes[o.gives],
        needs_kept=True,
        keeps_input=True,
        kernel="layer norm" if c.shape.layer_norm else "rms norm",
        elements=n,
    )


def enter(c: Context, o: LayerOperator) -> Operator:
    """The gather of sharded rows before a column-parallel product: f of Megatron-LM, or its gather under sp.

    Backward: the sum of the input gradients, or its scatter; under sp also the gather of the saved input again
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). A rank that makes products of its own rows gathers none.
    """
    entries = num_entries(c.shape, c.software, o) * (o.gives is not o.takes)
    forward, backward = (exchanges * entries for exchanges in c.entering)
    elements = c.sizes[o.takes if c.software.gathers_again else o.gives]
    kept = input_bytes(c.grid, c.software) * elements * num_kept_inputs(c.shape, c.grid, c.software, o)
    given = between_bytes(c.software) * c.sizes[o.gives]
    return Operator(o, forward=forward, backward=backward, kept=kept, given=given, keeps_input=True)


def entering(c: Context, share: Numbers) -> Exchanges:
    """The exchange of tp ranks around column-parallel products, forward and backward, if the input has a `share` of the
    residual stream's width."""
    sums = Exchange("all_reduce", "tp", share * c.summed, beside_weights=True)
    scattered_sums = Exchange("reduce_scatter", "tp", share * c.scattered, beside_weights=True)
    # The saved input is gathered while the input gradient is computed, if not all of it is saved.
    gather = Exchange("all_gather", "tp", share * c.scattered * c.software.gathers_again, is_hidden=True)
    return (Exchange("all_gather", "tp", share * c.scattered),), (sums, scattered_sums, gather)


def leave(c: Context, o: LayerOperator) -> Operator:
    """The sum of the partial results of a row-parallel product: g of Megatron-LM, or its scatter under sp."""
    forward, backward = c.leaving
    return Operator(o, forward=forward, backward=backward, given=c.bytes_of(o.gives))


def leaving(c: Context, share: Numbers) -> Exchanges:
    """The exchange of tp ranks after row-parallel products, forward and backward, if a `share` of it is a sum."""
    sums = Exchange("all_reduce", "tp", share * c.summed), Exchange("reduce_scatter", "tp", share * c.scattered)
    return sums, (Exchange("all_gather", "tp", share * c.scattered),)


def product(c: Context, o: LayerOperator) -> MatrixProduct:
    """The product of all tokens with a weight, or of experts' rows with their weights."""
    (weight_product,) = o.products
    if not weight_product.matrix.experts:
        return MatrixProduct.of(c.tokens, weight_product.matrix, c.grid.tp)
    rows, num_experts = c.expert_rows
    return MatrixProduct.of(rows, weight_product.matrix, c.grid.expert_tp, num_experts)


def rise(c: Context, o: LayerOperator) -> Operator:
    """The product for query, key and value, or the one into an MLP; it keeps its result."""
    kept = c.bytes_of(o.gives)
    of_experts = o.products[0].matrix.experts
    of_attention = c.shape.qkv_bias or c.shape.attention_bias
    has_bias = c.shape.bias or (of_attention and o.name == "qkv") or (c.shape.mlp_bias and o.name == "up")
    forward, backward = c.bias(c.sizes[o.gives], has_bias)
    inside = 0.0 if of_experts else c.gathered
    return Operator(
        o,
        products=(product(c, o),),
        forward_bytes=forward,
        backward_bytes=backward,
        kept=kept,
        given=kept,
        inside=inside,
    )


def fall(c: Context, o: LayerOperator) -> Operator:
    """The product of the joined heads, or the one out of an MLP; the operator before it keeps its input."""
    # The bias is added after the sum over tp, where tokens may be sharded; experts' biases are added to their own rows.
    has_bias = c.shape.bias or (c.shape.attention_bias and o.name == "out") or (c.shape.mlp_bias and o.name == "down")
    forward, backward = c.bias(c.sizes[o.gives] if o.products[0].matrix.experts else c.sizes.stream, has_bias)
    return Operator(
        o,
        products=(product(c, o),),
        forward_bytes=forward,
        backward_bytes=backward,
        given=c.bytes_of(o.gives),
    )


def join(c: Context, o: LayerOperator) -> Operator:
    """Bias, dropout and the sum with the residual stream. A parallel block first adds two parts up, and in the backward
    the gradients of the input of both halves. A scaled part has a scaled gradient, in a kernel of its own."""
    n, w, (forward, backward) = c.sizes[o.gives], c.software, residual_traffic(c.software.residual)
    # Dropout writes a mask of a byte an element, and what is left if it is a kernel of its own. In the backward it
    # reads the mask, and the gradient of what it dropped is a tensor of its own.
    forward += (1 + 2 * HALF * drops_apart(w.residual)) * w.dropout
    backward += (1 + 2 * HALF) * w.dropout
    kept, parts = n if w.dropout else 0.0, c.sizes.whole * (c.shape.parallel != "none")
    shared_input = n * (c.shape.parallel == "two-norms") + parts * (c.shape.parallel == "one-norm")
    return Operator(
        o,
        forward_bytes=(n + parts) * forward,
        backward_bytes=(n + shared_input) * backward + 2 * HALF * n * c.shape.scales_stream,
        kept=kept,
        given=between_bytes(c.software) * c.sizes[o.gives],
        needs_kept=True,
        kernel="join",
        elements=n + parts,
    )


def activate(c: Context, o: LayerOperator) -> Operator:
    """The activation of an MLP, and the product with its gate."""
    n, w = c.sizes[o.gives], c.software
    traffic = activation_traffic(w.activation)
    forward, backward = traffic.gated if c.shape.gated else traffic.plain
    return Operator(
        o,
        forward_bytes=n * (forward + HALF),
        backward_bytes=n * (backward + HALF),
        kept=n * (input_bytes(c.grid, c.software) + w.activation_kept * c.shape.gated),
        given=HALF * n,
        kernel="gated activation" if c.shape.gated else "activation",
        elements=n,
    )
