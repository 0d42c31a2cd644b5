"""FLOPs of one microbatch through each stage of a pipeline."""

from collections.abc import Sequence

from shardwright.spec.model import ModelSpec, matrix_parameters


def stage_flops(model: ModelSpec, layers: Sequence[int], sequences: int) -> tuple[float, ...]:
    """Forward FLOPs by stage, of a microbatch of `sequences`; stage s holds `layers[s]`, the last one also the head.

    2 a matrix element and token, and 4 x heads x head_dim x sequence for the scores and sums of attention, causality
    not discounted. Lookups, norms and the loss are not counted. The backward is twice the forward: once for the input
    gradients and once for the weights'. All stages together are spec.model.flops_per_token, times tokens.
    """
    head = model.vocab * model.hidden
    matrices = (matrix_parameters(model) - head) // model.layers
    layer = 2 * matrices + 4 * model.heads * model.head_size * model.sequence
    tokens = sequences * model.sequence
    last = len(layers) - 1
    return tuple(float(tokens * (count * layer + (2 * head if s == last else 0))) for s, count in enumerate(layers))
