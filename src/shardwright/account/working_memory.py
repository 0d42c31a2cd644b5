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

from shardwright.account.kept_tensors import FLOAT32, Share
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import Matrix


@dataclass(frozen=True)
class Need:
    """What an operator needs in its backward, and the kept tensors that are free by then."""

    num_bytes: int
    free: tuple[str, ...] = ()


def most_needed(needs: Iterable[Need], kept: Mapping[str, int]) -> int:
    """The most that one of them adds to what was kept, by tensor, less what of that is free by then."""
    return max((need.num_bytes - sum(kept.get(name, 0) for name in need.free) for need in needs), default=0)


@dataclass(frozen=True)
class OperatorNeeds:
    """What the operators of a job's layers need on any rank.

    `casts_gradients`: a weight's gradient is summed in another number type than it is computed in. `gathers`: tp ranks
    share the sequence between the layers.
    """

    job: JobSpec
    share: Share

    @property
    def casts_gradients(self) -> bool:
        """Whether a weight's gradient is summed in another number type than it is computed in."""
        return self.job.precision.gradient_number != self.job.precision.compute

    @property
    def gathers(self) -> bool:
        """Whether tp ranks share the sequence between layers, and gather it before a product."""
        return self.job.plan.sequence_parallel and self.job.plan.tp > 1

    @property
    def stream(self) -> int:
        """The gradient of the residual stream between the layers."""
        return self.share["input"]

    @property
    def whole(self) -> int:
        """The gradient of the residual stream within the layers, T H."""
        return self.share["whole attention normal"]

    def of_attention(self, behind: tuple[str, ...]) -> Iterator[Need]:
        """Those of a layer's first half, when what is `behind` it is free."""
        share, plan = self.share, self.job.plan
        matrices = share.tensors.shape.attention_matrices
        heads, attended, exact = (
            share["query, key and value"], share["attended"], FLOAT32 * int(share.tensors["attended"]),
        )  # fmt: skip
        yield self._summed(matrices[-1], attended, plan.tp, behind)
        blocks = 2 * exact if plan.cp > 1 and plan.cp_method != "ulysses" else 0
        gathered = plan.cp * 2 * attended if plan.cp > 1 and plan.cp_method == "all-gather" else 0
        yield Need(self.stream + attended + 2 * heads + blocks + gathered, behind)
        behind = (*behind, "attended", "attended before trade", "query", "key", "value", "log-sum-exp")
        yield Need(self.stream + 2 * heads + (exact if share.element < FLOAT32 else 0), behind)
        yield self._gathered(matrices[0], heads, plan.tp, behind)
        yield Need(self.stream + self._norm(), (*behind, "attention normal"))

    def of_mlp(self, prefix: str = "") -> Iterator[Need]:
        """Those of an MLP, or of shared experts."""
        share, tp = self.share, self.job.plan.tp
        shape = share.tensors.shape
        up, down = shape.shared_matrices if prefix else shape.mlp_matrices
        inner, made = share[f"{prefix}inner"], (f"{prefix}inner", f"{prefix}up", f"biased {prefix}up")
        yield self._summed(down, inner, tp, ())
        yield Need(self.stream + self._activation(inner), made[:1])
        yield self._gathered(up, inner * shape.gates, tp, made)
        if not prefix:
            yield Need(self.stream + self._norm(), (*made, "mlp normal"))

    def of_experts(self) -> Iterator[Need]:
        """Those of routed experts: tokens' way back, the experts, tokens' way there."""
        share, shape, tp = self.share, self.share.tensors.shape, self.job.plan.expert_tp_size
        up, down = shape.routed_matrices
        sent, rows, inner = share["rows to send"], share["dispatched"], share["expert inner"]
        exact, beside = FLOAT32 * int(share.tensors["rows to send"]), self.stream + self.whole
        yield Need(beside + sent + exact + (sent if share.element < FLOAT32 else 0))
        free: tuple[str, ...] = ("returned", "weights", "plain weights")
        yield Need(beside + 2 * rows + sent, free)
        yield Need(beside + rows + inner + self._weight(down, tp), free)
        free = (*free, "expert inner")
        yield Need(beside + self._activation(inner), free)
        free = (*free, "expert up")
        yield Need(beside + inner * shape.gates + rows + self._weight(up, tp), free)
        free = (*free, "dispatched")
        yield Need(beside + 2 * rows + sent + 2 * FLOAT32 * int(share.tensors.whole), free)
        yield Need(self.stream + self._norm(), (*free, "mlp normal", "scores", "choices"))

    def of_head(self, rows: int) -> Iterator[Need]:
        """Those of the loss, of the head with so many rows of the vocabulary, and of the norm before it."""
        share = self.share
        logits = share.element * int(share.tensors.tokens) * rows
        weight = share.element * rows * share.tensors.shape.hidden if self.casts_gradients else 0
        yield Need(logits if share.element < FLOAT32 else 0)
        free = ("softmax", "targets", "targets elsewhere")
        yield Need(logits + self.whole * (1 + self.gathers) + self.stream + weight, free)
        yield Need(self._norm(), (*free, "final normal"))

    def _summed(self, matrix: Matrix, taken: int, tp: int, free: tuple[str, ...]) -> Need:
        """A product whose parts tp ranks sum: the gradients of the sum, of what it takes, and of the weight."""
        return Need(self.stream + self.whole + taken + self._weight(matrix, tp), free)

    def _gathered(self, matrix: Matrix, given: int, tp: int, free: tuple[str, ...]) -> Need:
        """A product of what tp ranks gather: the gradients of what it gives, of what it takes, whole and a rank's share
        of it, and of the weight; and what it takes, gathered again."""
        shared = self.whole + self.stream if self.gathers else 0
        return Need(self.stream + given + self.whole + shared + self._weight(matrix, tp), free)

    def _weight(self, matrix: Matrix, tp: int) -> int:
        size = self.share.element * int(matrix.columns_on(tp) * matrix.inner_on(tp))
        return size if self.casts_gradients else 0

    def _activation(self, inner: int) -> int:
        """The gradient of what it gives, those of up and gate, and two forms of the activation."""
        return inner * (5 if self.share.tensors.shape.gated else 2)

    def _norm(self) -> int:
        """Four tensors in float32 where RMSNorm casts to it, and the gradient that comes."""
        exact = FLOAT32 * int(self.share.tensors.stream)
        if not self.share.is_rmsnorm:
            return self.stream
        return self.stream + exact * (4 if self.share.element < FLOAT32 else 3)
