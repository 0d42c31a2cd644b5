"""How many parameters each stage of a pipeline has on one tensor-parallel rank, without making any."""

from collections.abc import Sequence

from shardwright.spec.model import ModelSpec
from shardwright.spec.plan import split_evenly


def stage_elements(model: ModelSpec, layers: Sequence[int], tp: int = 1, tp_index: int = 0) -> tuple[int, ...]:
    """Elements by stage that index `tp_index` of the tp ranks holds; stage s has `layers[s]` layers.

    Matrices are cut over tp, norms and the biases of their outputs are not. Where rows do not divide, the first ranks
    have one more. A tied table is counted at both of its uses: each has a gradient.
    """

    def share(total: int) -> int:
        first, end = split_evenly(total, tp, tp_index)
        return end - first

    width = model.hidden
    norm = width * (2 if model.norm == "layernorm" else 1)
    qkv = share(model.num_kv_heads) * (model.heads // model.num_kv_heads + 2) * model.head_size
    inner = (2 if model.gated_mlp else 1) * share(model.ffn_size)
    layer = (qkv + share(model.heads * model.head_size) + inner + share(model.ffn_size)) * width + 2 * norm
    if model.bias:
        layer += qkv + inner + 2 * width
    elements = [count * layer for count in layers]
    table = table_elements(model, tp, tp_index)
    elements[0] += table + (model.sequence * width if model.positions == "learned" else 0)
    elements[-1] += norm + table
    return tuple(elements)


def table_elements(model: ModelSpec, tp: int = 1, tp_index: int = 0) -> int:
    """Elements of the embedding's table that index `tp_index` of the tp ranks holds."""
    first, end = split_evenly(model.vocab, tp, tp_index)
    return (end - first) * model.hidden
