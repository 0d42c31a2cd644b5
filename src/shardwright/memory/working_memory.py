"""Working memory: the bytes that a layer's operators need while they run, besides the tensors kept for the backward.

The backward needs the most. It goes from the last operator of a layer to the first. Each needs the gradient of its
result, the gradient of its input, tensors that it gathers or casts for itself, and the gradient of its weight before
that is added to the sum, if the sum has another number type; in addition there is always the gradient of the residual
stream. The kept tensors of the operators after it are free by then. The numbers follow the code of model/ and
parallel/; tests compare them with dry runs (tests/measure/test_working_memory.py).

Letters: T tokens of a rank within the layers, H hidden, F inner width of an MLP, R rows for experts. Sizes are bytes on
one rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwright.config.array_math import holds, least, most
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.job import JobSpec
from shardwright.config.matrix import Matrix
from shardwright.config.units import MIB
from shardwright.layers.layer_tensors import (
    ATTENTION,
    BLOCK,
    ENDS,
    EXPERT_MLP,
    LATENT,
    MLP,
    ROUTING,
    SHARED_MLP,
    LabelledTensor,
    LayerTensor,
    MlpTensors,
)
from shardwright.memory.kept_tensors import (
    FLOAT32,
    IN_ATTENTION,
    IN_ENDS,
    IN_LATENT,
    IN_MLP,
    IN_ROUTING,
    Bytes,
    Share,
    TensorBytes,
    Tensors,
)
from shardwright.sharding.block_sizes import logit_columns, loss_positions, num_loss_chunks, rows_at_once
from shardwright.sharding.score_blocks import SCORE_BYTES

# Bytes of an element that is cast along tokens: widened, transposed, and in fp8 (float8_gradient.py).
_WIDE = 5
_BLOCK_BYTES = 32 * MIB
# The tensors that the core of attention keeps between its first and its last product, of any attention.
_CORE_TENSORS: Tensors = (
    ATTENTION.attended,
    IN_ATTENTION.attended_before_trade,
    *(IN_ATTENTION.query, IN_ATTENTION.key, IN_ATTENTION.value),
    *(LATENT.query, IN_LATENT.key, IN_LATENT.value),
    ATTENTION.log_sum_exp,
)


@dataclass(frozen=True)
class BackwardNeed:
    """The memory that an operator needs in its backward, and the kept tensors that are free by then."""

    num_bytes: Bytes
    free: Tensors = ()


def most_needed(needs: Iterable[BackwardNeed], kept: TensorBytes) -> Bytes:
    """The most bytes that a need adds to the kept tensors (`kept`), less those that are free by then, in 16
    bits or in fp8; 0 at least."""

    def free_bytes(need: BackwardNeed) -> Bytes:
        return sum(kept[tensor] for tensor in _in_any_numbers(need.free) if tensor in kept)

    return most(0, *(need.num_bytes - free_bytes(need) for need in needs))


@lru_cache(maxsize=256)
def _in_any_numbers(tensors: Tensors) -> Tensors:
    """These tensors, and the same tensors in fp8."""
    casts = (tensor.in_float8 for tensor in tensors if isinstance(tensor, LayerTensor))
    return tuple(dict.fromkeys((*tensors, *casts)))


@dataclass(frozen=True)
class OperatorNeeds:
    """The needs of the operators of a job's layers, on any rank.

    `gathers`: tp ranks share the sequence between the layers.
    """

    job: JobSpec
    share: Share

    @property
    def gathers(self) -> bool:
        """True if tp ranks share the sequence between layers, and gather it before a product."""
        return self.job.plan.sequence_parallel and holds(self.job.plan.tp > 1)

    @property
    def stream(self) -> Bytes:
        """Bytes of the gradient of the residual stream between the layers."""
        return self.share[BLOCK.input]

    @property
    def whole(self) -> Bytes:
        """Bytes of the gradient of the residual stream within the layers, of T H elements."""
        return self.share[BLOCK.attention_norm_out.gathered]

    def of_attention(self, free: Tensors, kind: str = "dense") -> Iterator[BackwardNeed]:
        """Needs of attention, the first half of a layer of a kind. `free` are kept tensors of the operators after it,
        which the backward has freed."""
        share, plan = self.share, self.job.plan
        shape = share.tensors.shape
        matrices = shape.attention_matrices
        heads, attended, attended_float32 = (
            share[ATTENTION.heads],
            share[ATTENTION.attended],
            FLOAT32 * share.tensors[ATTENTION.attended],
        )
        # In one-norm blocks the gradient of the up product's result waits for the joint product of qkv and up.
        up_grad = share[MLP.up] if shape.parallel == "one-norm" else 0
        yield from self._of_norm_after(free)
        yield self._row_parallel(matrices[-1], attended + up_grad, plan.tp, free)
        is_blockwise = shape.is_blockwise(kind)
        blocks = 2 * attended_float32 if is_blockwise or (holds(plan.cp > 1) and not plan.trades_heads) else 0
        holds_all_keys = holds(plan.cp > 1) and CONTEXT_METHODS[plan.cp_method].exchange == "all_gather"
        gathered = plan.cp * 2 * attended if holds_all_keys else 0
        yield BackwardNeed(self.stream + up_grad + attended + 2 * heads + blocks + gathered + self._scores(), free)
        free = (*free, *_CORE_TENSORS)
        rotary = attended_float32 if self.job.runs_on_cpu and share.element < FLOAT32 else 0
        if self.job.model.qk_norm in ("full", "l2"):  # in float32, with the part along the input
            rotary = rotary + 3 * FLOAT32 * share.tensors[ATTENTION.heads]
        yield BackwardNeed(self.stream + up_grad + 2 * heads + rotary, free)
        # Parallel products add up the gradients of their common input.
        parallel_grad = self.whole * (shape.parallel == "one-norm")
        yield self._column_parallel(matrices[0], heads + up_grad + parallel_grad, plan.tp, free)
        yield BackwardNeed(self.stream + self._norm(), (*free, BLOCK.attention_norm_out))

    def of_mlp(self) -> Iterator[BackwardNeed]:
        """Needs of the MLP of a dense layer, the second half."""
        shape = self.share.tensors.shape
        yield from self._of_norm_after(())
        yield from self._of_products(shape.mlp_matrices, MLP, IN_MLP.biased_up)
        if shape.parallel != "one-norm":
            made = MLP.inner, MLP.up, IN_MLP.biased_up
            yield BackwardNeed(self.stream + self._norm(), (*made, BLOCK.mlp_norm_out))

    def of_shared_experts(self) -> Iterator[BackwardNeed]:
        """Needs of the MLP that all tokens of a layer with experts meet."""
        return self._of_products(self.share.tensors.shape.shared_matrices, SHARED_MLP, IN_MLP.biased_shared_up)

    def _of_products(
        self, matrices: tuple[Matrix, Matrix], mlp: MlpTensors, biased_up: LabelledTensor
    ) -> Iterator[BackwardNeed]:
        """Needs of an MLP: its last product, its activation and its first product."""
        shape, tp, inner = self.share.tensors.shape, self.job.plan.tp, self.share[mlp.inner]
        up, down = matrices
        # A weight in NF4 becomes numbers after the backward of its adapters, which frees their input.
        is_read = self._is_target(down) and self.job.model.adapter.row_format
        yield self._row_parallel(down, inner, tp, (mlp.inner,) if is_read else ())
        yield BackwardNeed(self.stream + self._activation(inner), (mlp.inner,))
        if shape.parallel != "one-norm":
            yield self._column_parallel(up, inner * shape.gates, tp, (mlp.inner, mlp.up, biased_up))

    def _of_norm_after(self, free: Tensors) -> Iterator[BackwardNeed]:
        """The need of a norm of the result of a half of a layer, if there is one, when the tensors `free` are free."""
        if self.share.tensors.shape.norms_after:
            yield BackwardNeed(self.stream + self._norm(), free)

    def of_experts(self) -> Iterator[BackwardNeed]:
        """Needs of routed experts: combine, the experts, dispatch."""
        share, shape, tp = self.share, self.share.tensors.shape, self.job.plan.expert_tp_size
        up, down = shape.routed_matrices
        sent, rows, inner = share[ROUTING.rows_to_send], share[ROUTING.dispatched], share[EXPERT_MLP.inner]
        residual = self.stream + self.whole
        yield from self._of_norm_after(())
        yield BackwardNeed(residual + 2 * rows + sent)
        num_local = most(1, shape.mixture.num // self.job.plan.ep)
        rows_at_work = share.tensors.arrived // num_local, share.tensors.arrived
        made = self._casts(down, tp, *rows_at_work) + num_local * self._numbers(down, tp)
        # The backward of adapters comes first, and frees their input.
        again = inner * self._is_target(down)
        read: Tensors = (EXPERT_MLP.inner,) if self._is_target(down) else ()
        yield BackwardNeed(residual + rows + inner + again + self._weight(down, tp) + made, read)
        free: Tensors = (EXPERT_MLP.inner,)
        if self.job.runs_on_cpu:
            # Besides its gradient and those of gate and up there is the activation, later its gradient times the
            # weights: once in float32, once in the number type of the model.
            gradients = inner * (1 + shape.gates)
            yield BackwardNeed(residual + gradients + inner + FLOAT32 * share.tensors[EXPERT_MLP.inner], free)
            yield BackwardNeed(residual + gradients + 2 * inner, free)
        else:
            yield BackwardNeed(residual + self._activation(inner), free)
        free = (*free, EXPERT_MLP.up, *(() if shape.mixture.weighs_input else (IN_ROUTING.arrived_weights,)))
        made = self._casts(up, tp, *rows_at_work) + num_local * self._numbers(up, tp)
        made, read = made + rows * self._is_target(up), (ROUTING.dispatched,) if self._is_target(up) else ()
        recomputed = rows * shape.mixture.weighs_input  # the weighed input of experts
        product = rows + recomputed + self._weight(up, tp) + made
        yield BackwardNeed(residual + inner * shape.gates + product, (*free, *read))
        free = (*free, ROUTING.dispatched)
        yield BackwardNeed(residual + 2 * rows + sent + 2 * FLOAT32 * share.tensors.whole, free)
        yield BackwardNeed(
            self.stream + self._norm(), (*free, BLOCK.mlp_norm_out, IN_ROUTING.scores, IN_ROUTING.choices)
        )

    def of_head(self, rows: Bytes) -> Iterator[BackwardNeed]:
        """Needs of the loss and of the head, with `rows` of the vocabulary, chunk by chunk (model/loss.py), and of the
        norm before it."""
        share, plan = self.share, self.job.plan
        tokens = loss_positions(self.job) * plan.microbatch_size * (plan.tp if self.gathers else 1)
        columns = logit_columns(rows, not self.job.runs_on_cpu)
        logits = tokens * columns
        copied = share.element * columns * share.tensors.shape.hidden * (columns > rows)
        shared = self.whole * tokens // share.tensors.tokens * self.gathers
        inputs = shared * (1 + (num_loss_chunks(self.job) > 1))  # the next chunk's input is on its way
        weight = self._product(rows, share.tensors.shape.hidden)
        narrow_bytes = share.element if share.element < FLOAT32 else 0
        yield BackwardNeed(self.stream + inputs + copied + (FLOAT32 + narrow_bytes) * logits)
        yield BackwardNeed(self.stream + inputs + copied + share.element * logits + shared + weight)
        yield BackwardNeed(self._norm(), (IN_ENDS.targets, IN_ENDS.uncounted, ENDS.final_norm_out))

    def before_block(self) -> Bytes:
        """Bytes that a module of a further token needs before its block: the gradients of the product's result and of
        its input, whose halves go to two norms."""
        matrix, stream = self.share.tensors.shape.further_matrix, self.stream
        product = 3 * stream + self._weight(matrix, self.job.plan.tp)
        return most(product, 2 * stream + self._norm())

    def _row_parallel(self, matrix: Matrix, input_grad: Bytes, tp: Bytes, free: Tensors) -> BackwardNeed:
        """Need of a product that tp ranks sum: the gradients of the sum, of its input, and of the weight."""
        again = input_grad * self._is_target(matrix)
        return BackwardNeed(
            self.stream + self.whole + input_grad + again + self._weight(matrix, tp) + self._made(matrix, tp), free
        )

    def _is_target(self, matrix: Matrix) -> bool:
        """True if a matrix has adapters, which add a gradient of its input of their own."""
        return bool(self.job.model.adapter.targets_of(matrix))

    def _scores(self) -> Bytes:
        """Bytes of the tensors in the shape of scores that attention's backward makes at once: for capped scores the
        scores, the slope of the cap, the weights and their gradient; with ALiBi a bias."""
        model, plan = self.job.model, self.job.plan
        by_score = 4 * FLOAT32 if model.attention_softcap else self.share.element * (model.positions == "alibi")
        keys, rows = self.job.tokens_within, plan.microbatch_size * self.share.tensors.heads
        if plan.trades_heads:
            keys, rows = model.sequence, rows // plan.cp
        queries = most(8, SCORE_BYTES // (FLOAT32 * rows * keys))
        return by_score * rows * keys * (queries + (keys - queries) * (keys < queries))

    def _column_parallel(self, matrix: Matrix, output_grad: Bytes, tp: Bytes, free: Tensors) -> BackwardNeed:
        """Need of a product whose input tp ranks gather: the gradients of its result, of its input, in full and a
        rank's share, and of the weight; and its input, gathered again."""
        # A frozen weight needs no input, and its adapters that of a rank's own tokens.
        is_frozen = self.job.model.is_adapted
        shared = self.stream + self.whole * (not is_frozen) if self.gathers else 0
        own = self.stream if self.gathers else self.whole
        made = self._made(matrix, tp) + own * self._is_target(matrix)
        return BackwardNeed(self.stream + output_grad + self.whole + shared + self._weight(matrix, tp) + made, free)

    def _made(self, matrix: Matrix, tp: Bytes) -> Bytes:
        """Bytes that a product makes of its operands: casts to fp8, or numbers of a weight in NF4."""
        return self._casts(matrix, tp) + self._numbers(matrix, tp)

    def _numbers(self, matrix: Matrix, tp: Bytes) -> Bytes:
        """Bytes of the numbers of a weight in NF4, of one expert if each has a matrix."""
        if not self.job.model.adapter.row_format:
            return 0
        return self.share.element * matrix.columns_on(tp) * matrix.inner_on(tp)

    def _casts(self, matrix: Matrix, tp: Bytes, rows: Bytes = 0, all_rows: Bytes = 0) -> Bytes:
        """Bytes that a product in fp8 needs in its backward: its operand dy in fp8; and for a weight gradient in fp8
        first dy and then x, widened to 16 bits, transposed and cast, and a part of the product. For experts, `rows` are
        those of one expert, and `all_rows` are cast at once."""
        if self.job.precision.float8 == "none" or self.job.runs_on_cpu or matrix.sharded_dim is None:
            return 0
        rows = rows if matrix.experts else self.share.tensors.tokens
        dy, x = rows * matrix.columns_on(tp), rows * matrix.inner_on(tp)
        cast = (all_rows if matrix.experts else rows) * matrix.columns_on(tp)
        if not self.job.precision.float8_weight_gradients:
            return cast
        block = least(FLOAT32 * matrix.columns_on(tp) * matrix.inner_on(tp), _BLOCK_BYTES)
        return cast + most(_WIDE * dy, dy + _WIDE * x, dy + x + block)

    def _weight(self, matrix: Matrix, tp: Bytes) -> Bytes:
        return self._product(matrix.columns_on(tp), matrix.inner_on(tp))

    def _product(self, rows: Bytes, columns: Bytes) -> Bytes:
        """Bytes of a weight's gradient before it is added to the sum: none, or a block if a CPU computes and sums in
        different numbers."""
        element, precision = self.share.element, self.job.precision
        if not self.job.runs_on_cpu or precision.gradient_number == precision.compute:
            return 0
        return element * least(rows, rows_at_once(columns, element)) * columns

    def _activation(self, inner: Bytes) -> Bytes:
        """Bytes for an activation: the gradients of its result, of up and of gate, and on a CPU two tensors more."""
        is_gated = self.share.tensors.shape.gated
        return inner * (2 + is_gated + 2 * (is_gated and self.job.runs_on_cpu))

    def _norm(self) -> Bytes:
        """Bytes for a norm: the gradient of its result, and if RMSNorm has no kernel of its own, four tensors cast to
        float32."""
        exact = FLOAT32 * self.share.tensors.stream
        if not self.share.is_rmsnorm or not self.job.runs_on_cpu:
            return self.stream
        return self.stream + exact * (4 if self.share.element < FLOAT32 else 3)
