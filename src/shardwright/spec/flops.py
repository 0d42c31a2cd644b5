"""FLOPs of a model, for both wings: what a token costs, and what each stage of a pipeline does of it."""

from collections.abc import Sequence

from shardwright.spec.model import ModelSpec


def matrix_parameters(model: ModelSpec) -> int:
    """Elements of the matrices that each token is multiplied with: all layers and the head, no lookups."""
    attention = attention_parameters(model)
    mlp = (3 if model.gated_mlp else 2) * model.hidden * model.ffn_size
    return model.layers * (attention + mlp) + model.vocab * model.hidden


def attention_parameters(model: ModelSpec) -> int:
    """Elements of the matrices of one layer's attention."""
    if not model.is_latent:
        return model.hidden * model.head_size * (2 * model.heads + 2 * model.num_kv_heads)
    latent, heads = model.latent, model.heads
    down = model.hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim)
    queries = (latent.q_rank or model.hidden) * heads * model.query_width
    keys_and_values = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return down + queries + keys_and_values + heads * latent.value_dim * model.hidden


def flops_per_token(model: ModelSpec) -> float:
    """Model FLOPs of one token, forward and backward: 6 a matrix element, and attention over the full sequence.

    Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B): 6 N + 12 x layers x heads x head_dim x sequence, where
    head_dim is the mean of the widths of keys and values. Causality is not discounted and recomputation not counted.
    """
    attention = 3 * model.layers * score_flops(model)
    return 6 * matrix_parameters(model) + attention


def score_flops(model: ModelSpec) -> int:
    """Forward FLOPs of one token and layer for scores and sums of values over the full sequence."""
    return 2 * model.heads * (model.query_width + model.value_width) * model.sequence


def stage_flops(model: ModelSpec, layers: Sequence[int], sequences: int) -> tuple[float, ...]:
    """Forward FLOPs by stage, of a microbatch of `sequences`; stage s holds `layers[s]`, the last one also the head.

    2 a matrix element and token, and those of attention's scores and sums, causality not discounted. Lookups, norms
    and the loss are not counted. The backward is twice the forward: once for the input gradients and once for the
    weights'. All stages together are flops_per_token, times tokens.
    """
    head = model.vocab * model.hidden
    matrices = (matrix_parameters(model) - head) // model.layers
    layer = 2 * matrices + score_flops(model)
    tokens = sequences * model.sequence
    last = len(layers) - 1
    return tuple(float(tokens * (count * layer + (2 * head if s == last else 0))) for s, count in enumerate(layers))
