"""What a microbatch keeps for its backward in one stage, in bytes, operator by operator.

What autograd saves, each tensor once, parameters not counted. Letters: T tokens of a microbatch (S x B), t those
between the tensor-parallel regions (T / tp under sequence parallel), H hidden, N query heads, G key/value heads, D
head width, F inner width of the MLP, V rows of the vocabulary, the latter all of one tp rank; e bytes of an element.
"""

from dataclasses import dataclass

from shardwright.spec.job import JobSpec
from shardwright.spec.plan import split_evenly

_FLOAT, _INTEGER, _BOOLEAN = 4, 8, 1  # bytes


@dataclass(frozen=True)
class _Sizes:
    tokens: int  # T
    outer_tokens: int  # t
    hidden: int
    head_dim: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    element: int


def _sizes(job: JobSpec, tp_index: int) -> _Sizes:
    model, plan = job.model, job.plan
    tokens = model.sequence * plan.microbatch_size

    def share(total: int) -> int:
        start, stop = split_evenly(total, plan.tp, tp_index)
        return stop - start

    groups = share(model.num_kv_heads)
    return _Sizes(
        tokens, tokens // (plan.tp if plan.sequence_parallel else 1), model.hidden, model.head_size,
        groups * (model.heads // model.num_kv_heads), groups, share(model.ffn_size), share(model.vocab),
        job.precision.compute_bytes,
    )  # fmt: skip


def stage_activation_bytes(job: JobSpec, stage: int, tp_index: int = 0) -> int:
    """All that one microbatch keeps in a stage."""
    counts = job.plan.stage_layers(job.model.layers)
    total = counts[stage] * layer_activation_bytes(job, tp_index)
    if stage == 0:
        total += embedding_activation_bytes(job, tp_index)
    else:
        total += _input_bytes(job, tp_index)
    return total + (head_activation_bytes(job, tp_index) if stage == len(counts) - 1 else 0)


def layer_activation_bytes(job: JobSpec, tp_index: int = 0) -> int:
    """What one layer keeps."""
    return 2 * _norm_bytes(job, tp_index) + _attention_bytes(job, tp_index) + _mlp_bytes(job, tp_index)


def embedding_activation_bytes(job: JobSpec, tp_index: int = 0) -> int:
    """Numbers of the rows. Tokens that are looked up as they came are the batch's own memory."""
    model, plan = job.model, job.plan
    tokens = _sizes(job, tp_index).tokens
    positions = _INTEGER * model.sequence if model.positions == "learned" else 0
    return positions + ((_INTEGER + _BOOLEAN) * tokens if plan.tp > 1 else 0)


def head_activation_bytes(job: JobSpec, tp_index: int = 0) -> int:
    """The last norm, and what the loss keeps: softmax in float32, and where each token's target is (model/loss.py)."""
    sizes = _sizes(job, tp_index)
    loss = sizes.tokens * (_FLOAT * sizes.vocab + _INTEGER + _BOOLEAN)
    return _norm_bytes(job, tp_index) + loss


def _input_bytes(job: JobSpec, tp_index: int) -> int:
    """What came from the stage before, where the first norm keeps a float32 copy of it instead."""
    sizes = _sizes(job, tp_index)
    is_copied = job.model.norm == "rmsnorm" and sizes.element != _FLOAT
    return sizes.outer_tokens * sizes.hidden * sizes.element if is_copied else 0


def _norm_bytes(job: JobSpec, tp_index: int) -> int:
    """Input, output (which the product after it keeps), scale; RMSNorm is made of operators that keep more."""
    sizes = _sizes(job, tp_index)
    elements = sizes.outer_tokens * sizes.hidden
    if job.model.norm == "rmsnorm":
        # x and x / rms(x) in float32, and one number a token.
        return (2 * _FLOAT + sizes.element) * elements + _FLOAT * sizes.outer_tokens + sizes.element * sizes.hidden
    return sizes.element * (2 * elements + 2 * sizes.outer_tokens + 2 * sizes.hidden)


def _attention_bytes(job: JobSpec, tp_index: int) -> int:
    """Queries, keys, values and output; log of the sum of exponentials of each row (arXiv 2205.14135, section 3.1)."""
    model, sizes = job.model, _sizes(job, tp_index)
    queries = sizes.tokens * sizes.heads * sizes.head_dim
    pairs = 2 * sizes.tokens * sizes.kv_heads * sizes.head_dim
    kept = sizes.element * (queries + pairs)
    if model.positions == "rotary":
        kept += 2 * _FLOAT * model.sequence * (sizes.head_dim // 2)  # cosines and sines
    elif not model.bias and sizes.kv_heads > 1 and model.heads > model.num_kv_heads:
        kept += sizes.element * queries  # keys and values are views of a product that also holds the queries
    return kept + sizes.element * queries + _FLOAT * sizes.tokens * sizes.heads


def _mlp_bytes(job: JobSpec, tp_index: int) -> int:
    """What the activation reads and what the last product reads; gated, also act(gate)."""
    sizes = _sizes(job, tp_index)
    return sizes.element * sizes.tokens * sizes.ffn * (4 if job.model.gated_mlp else 2)
