"""FLOPs of a model, for both wings: what a token costs, and what each stage of a pipeline does of it."""

from collections.abc import Sequence

from shardwright.spec.model import ModelSpec


def matrix_parameters(model: ModelSpec) -> int:
    """Elements of the matrices that each token is multiplied with: all layers and the head, no lookups."""
    attention = model.hidden * model.head_size * (2 * model.heads + 2 * model.num_kv_heads)
    mlp = (3 if model.gated_mlp else 2) * model.hidden * model.ffn_size
    return model.layers * (attention + mlp) + model.vocab * model.hidden


def flops_per_token(model: ModelSpec) -> float:
    """Model FLOPs of one token, forward and backward: 6 a matrix element, and attention over the full sequence.

    Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B): 6 N + 12 x layers x heads x head_dim x sequence.
    Causality is not discounted and recomputation not counted.
    """
    attention = 12 * model.layers * model.heads * model.head_size * model.sequence
    return 6 * matrix_parameters(model) + attention


def stage_flops(model: ModelSpec, layers: Sequence[int], sequences: int) -> tuple[float, ...]:
    """Forward FLOPs by stage, of a microbatch of `sequences`; stage s holds `layers[s]`, the last one also the head.

    2 a matrix element and token, and 4 x heads x head_dim x sequence for the scores and sums of attention, causality
    not discounted. Lookups, norms and the loss are not counted. The backward is twice the forward: once for the input
    gradients and once for the weights'. All stages together are flops_per_token, times tokens.
    """
    head = model.vocab * model.hidden
    matrices = (matrix_parameters(model) - head) // model.layers
    layer = 2 * matrices + 4 * model.heads * model.head_size * model.sequence
    tokens = sequences * model.sequence
    last = len(layers) - 1
    return tuple(float(tokens * (count * layer + (2 * head if s == last else 0))) for s, count in enumerate(layers))
