"""FLOPs of a model, for both wings: what a token costs, and what each stage of a pipeline does of it."""

from collections.abc import Sequence

from shardwright.config.model import ModelSpec


def matrix_parameters(model: ModelSpec) -> int:
    """Elements of the matrices that each token is multiplied with: all layers and the head, no lookups.

    Of experts those that a token chooses, which is their average where experts choose tokens.
    """
    return sum(layer_parameters(model, layer) for layer in range(model.layers)) + model.vocab * model.hidden


def layer_parameters(model: ModelSpec, layer: int) -> int:
    """Elements of the matrices of one layer that each token is multiplied with."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not model.moe.has_experts(layer):
        return attention_parameters(model) + matrices * model.ffn_size
    moe = model.moe
    width = moe.num_chosen * moe.ffn_size(model.ffn_size) + moe.shared_size(model.ffn_size)
    return attention_parameters(model) + matrices * width + (moe.experts + moe.shared_gate) * model.hidden


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
    tokens, scores = sequences * model.sequence, score_flops(model)
    found, first = list[float](), 0
    for stage, count in enumerate(layers):
        matrices = sum(layer_parameters(model, layer) for layer in range(first, first + count))
        head = model.vocab * model.hidden if stage == len(layers) - 1 else 0
        found.append(float(tokens * (2 * (matrices + head) + count * scores)))
        first += count
    return tuple(found)
