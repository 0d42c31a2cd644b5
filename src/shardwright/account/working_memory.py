"""Memory that a layer's operators need while they run, beside what was kept for the backward: working memory.

The most of it is needed in a backward. From the last operator of a layer to the first: the gradient of what it gave,
that of what it takes, what it gathers or casts for itself, and the gradient of its weight before that is added to the
sum, where the sum is in another number type; and all the while the gradient of the residual stream. What the operators
behind it had kept is free by then. What the code holds at once is read from model/ and parallel/; tests compare with
dry runs (tests/measure/test_working_memory.py).

Letters: T tokens of a rank within the layers, H hidden, F inner width of an MLP, R rows for experts. Sizes are bytes on
one rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardwright.account.kept_tensors import FLOAT32, IN_FLOAT8, Bytes, Share
from shardwright.config.array_math import holds, least, most
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.job import JobSpec
from shardwright.config.matrix import Matrix
from shardwright.config.units import MIB
from shardwright.sharding.gradient_blocks import rows_at_once
from shardwright.sharding.loss_chunks import loss_positions, num_loss_chunks
from shardwright.sharding.score_blocks import SCORE_BYTES

# Bytes of an element that is cast again along tokens: widened, its transpose, and that in fp8 (float8_gradient.py).
_WIDE = 5
_BLOCK_BYTES = 32 * MIB


@dataclass(frozen=True)
class BackwardNeed:
    """The memory that an operator needs in its backward, and the kept tensors that are free by then."""

    num_bytes: Bytes
    free: tuple[str, ...] = ()


def most_needed(needs: Iterable[BackwardNeed], kept: Mapping[str, Bytes]) -> Bytes:
    """The most that one of them adds to what was kept, by tensor, less what of that is free by then, in whatever
    numbers it was kept; 0 at least."""

    def free_bytes(need: BackwardNeed) -> Bytes:
        return sum(kept[name] for name in _in_any_numbers(need.free) if name in kept)

    return most(0, *(need.num_bytes - free_bytes(need) for need in needs))


@lru_cache(maxsize=256)
def _in_any_numbers(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of these tensors, and of the same in fp8."""
    return tuple(dict.fromkeys(either for name in names for either in (name, IN_FLOAT8.format(name))))


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
        """The gradient of the residual stream between the layers."""
        return self.share["input"]

    @property
    def whole(self) -> Bytes:
        """The gradient of the residual stream within the layers, T H."""
        return self.share["whole attention normal"]

    def of_attention(self, behind: tuple[str, ...], kind: str = "dense") -> Iterator[BackwardNeed]:
        """Needs of the first half of a layer of a kind, when what is `behind` it is free."""
        share, plan = self.share, self.job.plan
        shape = share.tensors.shape
        matrices = shape.attention_matrices
        heads, attended, exact = (
            share["query, key and value"], share["attended"], FLOAT32 * share.tensors["attended"],
        )  # fmt: skip
        # In one-norm blocks the gradient of what goes into the MLP waits for that of query, key and value.
        both = share["up"] if shape.parallel == "one-norm" else 0
        yield from self._behind(behind)
        yield self._summed(matrices[-1], attended + both, plan.tp, behind)
        is_blockwise = shape.is_blockwise(kind)
        blocks = 2 * exact if is_blockwise or (holds(plan.cp > 1) and not plan.trades_heads) else 0
        holds_all_keys = holds(plan.cp > 1) and CONTEXT_METHODS[plan.cp_method].exchange == "all_gather"
        gathered = plan.cp * 2 * attended if holds_all_keys else 0
        yield BackwardNeed(self.stream + both + attended + 2 * heads + blocks + gathered + self._scores(), behind)
        behind = (*behind, "attended", "attended before trade", "query", "key", "value", "log-sum-exp")
        turned = exact if self.job.runs_on_cpu and share.element < FLOAT32 else 0
        if self.job.model.qk_norm in ("full", "l2"):  # in float32, with what is along the input
            turned = turned + 3 * FLOAT32 * share.tensors["query, key and value"]
        yield BackwardNeed(self.stream + both + 2 * heads + turned, behind)
        # Products side by side add up the gradient of what they take.
        more = self.whole * (shape.parallel == "one-norm")
        yield self._gathered(matrices[0], heads + both + more, plan.tp, behind)
        yield BackwardNeed(self.stream + self._norm(), (*behind, "attention normal"))

    def of_mlp(self, prefix: str = "") -> Iterator[BackwardNeed]:
        """Needs of an MLP, or of shared experts."""
        share, tp = self.share, self.job.plan.tp
        shape = share.tensors.shape
        up, down = shape.shared_matrices if prefix else shape.mlp_matrices
        inner, made = share[f"{prefix}inner"], (f"{prefix}inner", f"{prefix}up", f"biased {prefix}up")
        yield from () if prefix else self._behind(())
        yield self._summed(down, inner, tp, ())
        yield BackwardNeed(self.stream + self._activation(inner), made[:1])
        if shape.parallel == "one-norm":
            return
        yield self._gathered(up, inner * shape.gates, tp, made)
        if not prefix:
            yield BackwardNeed(self.stream + self._norm(), (*made, "mlp normal"))

    def _behind(self, free: tuple[str, ...]) -> Iterator[BackwardNeed]:
        """The need of a norm of what a half of a layer gives, if there is one, when so much is free."""
        if self.share.tensors.shape.norms_after:
            yield BackwardNeed(self.stream + self._norm(), free)

    def of_experts(self) -> Iterator[BackwardNeed]:
        """Needs of routed experts: tokens' way back, the experts, tokens' way there."""
        share, shape, tp = self.share, self.share.tensors.shape, self.job.plan.expert_tp_size
        up, down = shape.routed_matrices
        sent, rows, inner = share["rows to send"], share["dispatched"], share["expert inner"]
        beside = self.stream + self.whole
        yield from self._behind(())
        yield BackwardNeed(beside + 2 * rows + sent)
        held = most(1, shape.mixture.num // self.job.plan.ep)
        each = share.tensors.arrived // held, share.tensors.arrived
        yield BackwardNeed(beside + rows + inner + self._weight(down, tp) + self._casts(down, tp, *each))
        free: tuple[str, ...] = ("expert inner",)
        if self.job.runs_on_cpu:
            # Beside its gradient and that of gate and up the activation, which is then its gradient times the weights:
            # once in float32, once as it is.
            given = inner * (1 + shape.gates)
            yield BackwardNeed(beside + given + inner + FLOAT32 * share.tensors["expert inner"], free)
            yield BackwardNeed(beside + given + 2 * inner, free)
        else:
            yield BackwardNeed(beside + self._activation(inner), free)
        free = (*free, "expert up", *(() if shape.mixture.weighs_input else ("arrived weights",)))
        casts = self._casts(up, tp, *each)
        again = rows * shape.mixture.weighs_input  # what goes into experts, made again
        yield BackwardNeed(beside + inner * shape.gates + rows + again + self._weight(up, tp) + casts, free)
        free = (*free, "dispatched")
        yield BackwardNeed(beside + 2 * rows + sent + 2 * FLOAT32 * share.tensors.whole, free)
        yield BackwardNeed(self.stream + self._norm(), (*free, "mlp normal", "scores", "choices"))

    def of_head(self, rows: Bytes) -> Iterator[BackwardNeed]:
        """Needs of the loss and of the head with so many rows of the vocabulary, chunk by chunk (model/loss.py), and of
        the norm before it."""
        share, plan = self.share, self.job.plan
        tokens = loss_positions(self.job) * plan.microbatch_size * (plan.tp if self.gathers else 1)
        logits = tokens * rows
        shared = self.whole * tokens // share.tensors.tokens * self.gathers
        inputs = shared * (1 + (num_loss_chunks(self.job) > 1))  # the next chunk's is on its way
        weight = self._product(rows, share.tensors.shape.hidden)
        narrow = share.element if share.element < FLOAT32 else 0
        yield BackwardNeed(self.stream + inputs + (FLOAT32 + narrow) * logits)
        yield BackwardNeed(self.stream + inputs + share.element * logits + shared + weight)
        yield BackwardNeed(self._norm(), ("targets", "targets that do not count", "final normal"))

    def before_block(self) -> Bytes:
        """The memory that a module of a further token needs before its block: the gradients of the product's result and
        of its input, whose halves two norms take on."""
        matrix, stream = self.share.tensors.shape.further_matrix, self.stream
        product = 3 * stream + self._weight(matrix, self.job.plan.tp)
        return most(product, 2 * stream + self._norm())

    def _summed(self, matrix: Matrix, taken: Bytes, tp: Bytes, free: tuple[str, ...]) -> BackwardNeed:
        """A product whose parts tp ranks sum: the gradients of the sum, of what it takes, and of the weight."""
        return BackwardNeed(self.stream + self.whole + taken + self._weight(matrix, tp) + self._casts(matrix, tp), free)

    def _scores(self) -> Bytes:
        """The bytes in the shape of scores that attention's backward makes at once: for capped scores these, the slope
        of the cap, the weights and their gradient; and a bias."""
        model, plan = self.job.model, self.job.plan
        by_score = 4 * FLOAT32 if model.attention_softcap else self.share.element * (model.positions == "alibi")
        keys, rows = self.job.tokens_within, plan.microbatch_size * self.share.tensors.heads
        if plan.trades_heads:
            keys, rows = model.sequence, rows // plan.cp
        queries = most(8, SCORE_BYTES // (FLOAT32 * rows * keys))
        return by_score * rows * keys * (queries + (keys - queries) * (keys < queries))

    def _gathered(self, matrix: Matrix, given: Bytes, tp: Bytes, free: tuple[str, ...]) -> BackwardNeed:
        """A product of what tp ranks gather: the gradients of what it gives, of what it takes, whole and a rank's share
        of it, and of the weight; and what it takes, gathered again."""
        shared = self.whole + self.stream if self.gathers else 0
        casts = self._casts(matrix, tp)
        return BackwardNeed(self.stream + given + self.whole + shared + self._weight(matrix, tp) + casts, free)

    def _casts(self, matrix: Matrix, tp: Bytes, rows: Bytes = 0, all_rows: Bytes = 0) -> Bytes:
        """The bytes that a product in fp8 needs in its backward: its operand dy in fp8; and for a weight gradient in
        fp8 first dy and then x, widened to 16 bits and transposed, cast again, and a part of the product. Of experts it
        is one's `rows`, and `all_rows` are cast at once."""
        if self.job.precision.float8 == "none" or self.job.runs_on_cpu or matrix.cut is None:
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
        """The bytes of a weight's gradient that exist before it is added to the sum: none, or a block if a CPU computes
        and sums in different numbers."""
        element, precision = self.share.element, self.job.precision
        if not self.job.runs_on_cpu or precision.gradient_number == precision.compute:
            return 0
        return element * least(rows, rows_at_once(columns, element)) * columns

    def _activation(self, inner: Bytes) -> Bytes:
        """The gradient of what it gives, those of up and gate, and on a CPU two forms of the activation."""
        is_gated = self.share.tensors.shape.gated
        return inner * (2 + is_gated + 2 * (is_gated and self.job.runs_on_cpu))

    def _norm(self) -> Bytes:
        """The gradient that comes, and where RMSNorm is no kernel of its own four tensors in float32, to which it
        casts."""
        exact = FLOAT32 * self.share.tensors.stream
        if not self.share.is_rmsnorm or not self.job.runs_on_cpu:
            return self.stream
        return self.stream + exact * (4 if self.share.element < FLOAT32 else 3)
