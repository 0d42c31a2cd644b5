"""The operators of one training step on one rank: shapes, FLOPs, bytes moved and kept, collectives by axis.

Which operators there are and what they take and give says layer_operators.py; here is a function for each kind, for
one microbatch on one rank; attention_operators.py, expert_operators.py and embedding_head.py have those of these parts.
What the kernels of a generation of software read, write and keep comes from its description (config/software.py).

Letters: T tokens of a microbatch on a rank (sequence / cp x microbatch size), H hidden, t tensor-parallel degree, N and
G query and key/value heads, D head width, F inner width of the MLP, V vocabulary. Sizes are bytes. Every number may be
an array with one entry a plan; so an exchange that only some plans have is there for all, of no bytes for the others.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from shardwright.config.matrix import Matrix
from shardwright.config.measured_table import Kernel
from shardwright.config.model_shape import ModelShape
from shardwright.config.software import SoftwareSpec
from shardwright.workload.arrays import Numbers
from shardwright.workload.layer_operators import LayerOperator
from shardwright.workload.query import PlanGrid
from shardwright.workload.tensor_sizes import TensorSizes

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
        return cls(rows, matrix.inner_on(tp), matrix.columns_on(tp), batch)

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

    `is_hidden`: it runs beside the product of its operator's neighbour, whatever the software; `beside_weights`: beside
    that one's weight gradient, if the software does so, which a schedule may put off (`is_put_off`). What goes around a
    ring does so in `rounds`, of `size` bytes together.
    """

    kind: Kind
    axis: Axis
    size: Numbers
    is_hidden: bool = False
    beside_weights: bool = False
    is_put_off: bool = True
    rounds: int = 1


Exchanges = tuple[tuple[Exchange, ...], tuple[Exchange, ...]]  # in the forward, in the backward


@dataclass(frozen=True)
class Operator:
    """The costs of an operator. `forward_bytes` and `backward_bytes` are elementwise traffic; products' and scores' is
    their own.

    `kept` is what it keeps for its backward, of the tensor that it gives or, if it `keeps_input`, takes; `kept_result`
    the part of attention's that policies which drop its scores still keep. `given` is its result, and `inside` what its
    backward needs beside what was kept and the gradients of its result and of what it takes. Of what it kept, its
    result is for the backward of the operator behind it, unless its own needs it (`needs_kept`). One that is computed
    `in_backward` takes no time in the forward, and puts nothing off to the weight gradients.

    `kernel` is what it computes element by element where that can be measured, of so many `elements`.
    """

    of: LayerOperator
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
        """Its name in the list."""
        return self.of.name

    @property
    def kept_tensor(self) -> str:
        """The tensor that it keeps."""
        return self.of.takes if self.keeps_input else self.of.gives

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
    """The arguments of every operator's function: the model, the plan and the software, the piece of the model, and
    sizes that follow from them."""

    shape: ModelShape
    grid: PlanGrid
    software: SoftwareSpec
    kind: str = "dense"

    @cached_property
    def tokens(self) -> Numbers:
        """T."""
        return self.shape.sequence / self.grid.cp * self.grid.microbatch

    @cached_property
    def sizes(self) -> TensorSizes:
        """Elements of tensors."""
        shape, grid, here = self.shape, self.grid, np.where(self.grid.sequence_parallel, self.grid.tp, 1)
        of_tokens = TensorSizes(shape, grid.tp, grid.expert_tp, self.tokens, self.tokens / here)
        if shape.experts is None:
            return of_tokens
        # Where experts are whole tp ranks share the tokens, be the residual stream sharded or not.
        routed = self.tokens / np.where(grid.expert_tp == 1, grid.tp, here)
        rows, held = self.expert_rows
        return replace(of_tokens, routed=routed, sent=self.sent, arrived=rows * held)

    @property
    def norm(self) -> tuple[float, float]:
        """Bytes that a norm moves, by element, forward and backward."""
        other = self.software.layer_norm if self.shape.layer_norm else None
        return other or self.software.norm

    def bias(self, elements: Numbers, is_there: bool) -> tuple[Numbers, Numbers]:
        """Bytes that the sum with a bias moves, forward and backward, where there is one."""
        forward, backward = self.software.bias
        return (elements * forward, elements * backward) if is_there else (0.0, 0.0)

    @cached_property
    def sent(self) -> Numbers:
        """Rows that a rank sends to experts."""
        return self.tokens * self.grid.expert_tp / self.grid.tp * self.shape.mixture.topk

    @cached_property
    def expert_rows(self) -> tuple[Numbers, Numbers]:
        """(rows of each expert, how many a rank holds): all get as many."""
        num = self.shape.mixture.num
        return self.sent * self.grid.ep / num, np.maximum(1, num // self.grid.ep)

    def bytes_of(self, tensor: str) -> Numbers:
        """Bytes of a tensor of 16 bits an element."""
        return HALF * self.sizes[tensor]

    @cached_property
    def whole(self) -> Numbers:
        """Bytes of the residual stream as products read it, whole along what tp ranks share of the sequence."""
        return HALF * self.sizes.whole

    @cached_property
    def gathered(self) -> Numbers:
        """Bytes of that where it is gathered for a product and again for its weight gradient."""
        return self.whole * (self.scattered > 0)

    @cached_property
    def summed(self) -> Numbers:
        """Bytes of what tp ranks sum: the residual stream in full, where it is summed for all of them."""
        return self._between * (1 - np.asarray(self.grid.sequence_parallel))

    @cached_property
    def scattered(self) -> Numbers:
        """Bytes of the same where it is scattered among them and gathered again (sequence parallel)."""
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
    """Layernorm or RMSNorm of the residual stream. In a parallel block the second takes what the first one keeps."""
    n, s = c.sizes[o.takes], c.software
    forward, backward = c.norm
    kept = 0.0 if o.name == "mlp norm" and o.takes == "input" else n * s.norm_kept
    return Operator(
        o, forward_bytes=n * forward, backward_bytes=n * backward, kept=kept, given=c.bytes_of(o.gives),
        needs_kept=True, keeps_input=True, kernel="layer norm" if c.shape.layer_norm else "rms norm", elements=n,
    )  # fmt: skip


def enter(c: Context, o: LayerOperator) -> Operator:
    """The sharded rows come together before a column-parallel product: f of Megatron-LM, or its gather under sp.

    Backward: the sum of the input gradients, or its scatter; under sp also the gather of the saved input again
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). What is kept is the product's input; that of shared
    experts is the router's, which keeps it. Nothing comes together where each rank makes the product of its own rows.
    """
    forward, backward = ((), ()) if o.gives == o.takes else c.entering
    kept = 0.0 if o.name == "shared enter" else c.bytes_of(o.takes)
    return Operator(o, forward=forward, backward=backward, kept=kept, given=c.bytes_of(o.gives), keeps_input=True)


def entering(c: Context, share: Numbers) -> Exchanges:
    """The exchange of tp ranks around column-parallel products, forward and backward, if the input has a `share` of the
    residual stream's width."""
    whole = Exchange("all_reduce", "tp", share * c.summed, beside_weights=True)
    parts = Exchange("reduce_scatter", "tp", share * c.scattered, beside_weights=True)
    # The saved input comes back while the input gradient is computed.
    again = Exchange("all_gather", "tp", share * c.scattered, is_hidden=True)
    return (Exchange("all_gather", "tp", share * c.scattered),), (whole, parts, again)


def leave(c: Context, o: LayerOperator) -> Operator:
    """The partial sums of a row-parallel product come together: g of Megatron-LM, or its scatter under sp."""
    forward, backward = c.leaving
    return Operator(o, forward=forward, backward=backward, given=c.bytes_of(o.gives))


def leaving(c: Context, share: Numbers) -> Exchanges:
    """The exchange of tp ranks behind row-parallel products, forward and backward, if a `share` of it is a sum."""
    sums = Exchange("all_reduce", "tp", share * c.summed), Exchange("reduce_scatter", "tp", share * c.scattered)
    return sums, (Exchange("all_gather", "tp", share * c.scattered),)


def product(c: Context, o: LayerOperator) -> MatrixProduct:
    """The product of all tokens with a weight, or of the rows that come to experts with theirs."""
    (only,) = o.products
    if not only.matrix.experts:
        return MatrixProduct.of(c.tokens, only.matrix, c.grid.tp)
    rows, held = c.expert_rows
    return MatrixProduct.of(rows, only.matrix, c.grid.expert_tp, held)


def rise(c: Context, o: LayerOperator) -> Operator:
    """The product for query, key and value, and that into an MLP; keeps what it gives."""
    kept = c.bytes_of(o.gives)
    of_experts = o.products[0].matrix.experts
    has_bias = c.shape.bias or (c.shape.qkv_bias and o.part == "qkv")
    forward, backward = c.bias(c.sizes[o.gives], has_bias)
    inside = 0.0 if of_experts else c.gathered
    return Operator(o, (product(c, o),), None, forward, backward, kept=kept, given=kept, inside=inside)


def fall(c: Context, o: LayerOperator) -> Operator:
    """The product that joins the heads, and that out of an MLP; its input is what the operator before keeps."""
    # The bias is added behind the sum over tp, where tokens may be sharded; that of experts to their own rows.
    forward, backward = c.bias(c.sizes[o.gives] if o.products[0].matrix.experts else c.sizes.stream, c.shape.bias)
    return Operator(o, (product(c, o),), None, forward, backward, given=c.bytes_of(o.gives))


def join(c: Context, o: LayerOperator) -> Operator:
    """Bias, dropout and the sum with the residual stream. In a parallel block two parts are added up before, and the
    gradients of what both halves take. Where what is added is scaled so is its gradient, in a kernel of its own."""
    n, w = c.sizes[o.gives], c.software
    kept, parts = n if w.dropout else 0.0, c.sizes.whole * (c.shape.parallel != "none")
    taken = n * (c.shape.parallel == "two-norms") + parts * (c.shape.parallel == "one-norm")
    backward = (n + taken) * w.residual[1] + 2 * HALF * n * c.shape.scales_stream
    return Operator(
        o, (), None, (n + parts) * w.residual[0], backward, kept=kept, given=c.bytes_of(o.gives), needs_kept=True,
        kernel="join", elements=n + parts,
    )  # fmt: skip


def activate(c: Context, o: LayerOperator) -> Operator:
    """The activation of an MLP, and the product with its gate."""
    n, w = c.sizes[o.gives], c.software
    # The bytes of an activation are of one with a gate: without, one tensor less is read, and one less written, in a
    # fused kernel. Each counts the element that leaves it besides.
    other = None if c.shape.gated else w.plain_activation
    plain, (forward, backward) = 1.0 if c.shape.gated or other else 2 / 3, other or w.activation
    return Operator(
        o, (), None, plain * n * (forward + HALF), plain * n * (backward + HALF),
        kept=n * (HALF + w.activation_kept), given=HALF * n,
        kernel="gated activation" if c.shape.gated else "activation", elements=n,
    )  # fmt: skip
