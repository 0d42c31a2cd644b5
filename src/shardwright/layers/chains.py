"""Layers, embedding and head as the costs of their operators; the bytes that they keep under a recomputation policy.

An operator is a line in layer_operators.py, and a function here that costs it.
"""

from collections.abc import Callable, Iterable

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.recompute_policy import ALL_AGAIN
from shardwright.config.software import SoftwareSpec
from shardwright.layers import attention_operators as heads
from shardwright.layers import embedding_head as ends
from shardwright.layers import expert_operators as routed
from shardwright.layers import operators as op
from shardwright.layers.adapter_operators import adapted
from shardwright.layers.arrays import Numbers
from shardwright.layers.autocast import with_casts
from shardwright.layers.layer_operators import ALWAYS_RECOMPUTED, LayerOperator, piece_operators
from shardwright.layers.layer_tensors import HALF
from shardwright.layers.operators import Context, Operator
from shardwright.layers.query import PlanGrid, named_operators

Chain = tuple[Operator, ...]
_BEFORE = ("embedding norm", "hidden norm")  # the first layer, or the block of a further token
_BEHIND = ("attention out norm", "mlp out norm")  # the halves of a layer

_COSTS: dict[str, Callable[[Context, LayerOperator], Operator]] = {
    **dict.fromkeys(("attention norm", "mlp norm", "norm before experts", "final norm", *_BEFORE, *_BEHIND), op.norm),
    **dict.fromkeys(("attention enter", "mlp enter", "shared enter"), op.enter),
    **dict.fromkeys(("attention leave", "mlp leave", "shared leave"), op.leave),
    **dict.fromkeys(("attention join", "mlp join"), op.join),
    **dict.fromkeys(("up", "expert up", "shared up"), op.rise),
    **dict.fromkeys(("activation", "shared activation"), op.activate),
    "expert activation": routed.activate,
    **dict.fromkeys(("out", "down", "expert down", "shared down"), op.fall),
    "qkv": heads.project,
    "heads": heads.heads_of_latents,
    "rotary": heads.rotate,
    "attention": heads.attention,
    "router": routed.route,
    "experts enter": routed.assemble,
    "dispatch": routed.dispatch,
    "weigh": routed.weigh_rows,
    "combine": routed.combine,
    "shared gate": routed.weigh_shared,
    "experts leave": routed.total,
    "embedding": ends.embed,
    "project": ends.project,
    "head enter": ends.enter_head,
    "head": ends.head,
}


def chains(shape: ModelShape, grid: PlanGrid, software: SoftwareSpec) -> dict[str, Chain]:
    """The operators of each kind of piece: layers, embedding, head, and the modules that predict a further token."""
    kinds = (*shape.kinds, "embedding", "head", *(("mtp",) if shape.mtp else ()))
    chain_of = {kind: _chain(Context(shape, grid, software, kind)) for kind in kinds}
    if grid.element_bytes == HALF:
        return chain_of
    return {kind: tuple(o.in_numbers_of(grid.element_bytes) for o in chain) for kind, chain in chain_of.items()}


def _chain(c: Context) -> Chain:
    operators = (adapted(c, _COSTS[o.name](c, o)) for o in piece_operators(c.shape, c.kind))
    return tuple(with_casts(c.software, o) for o in operators)


def kept_bytes(chain: Chain, policy: str) -> Numbers:
    """The bytes that a chain keeps of one microbatch from forward to backward under a policy of recomputation.

    `PlanGrid.recompute` has the policies. full: only the layer's input, which its first norm keeps in 16 bits. stage:
    nothing, because the stage keeps its input. selective: all but the attention core's scores (Korthikanti et al. 2022,
    section 5). matmul: the results of attention and of every second product, and the input (torchtitan's "selective
    op", whose list has no grouped products, which are those of routed experts). kernel: those of attention, and the
    input (the same where products are no operators of torch, as in nvfp4). heads: query, key and value, too (MaxText's
    policies that name these). latents: all but what latent attention makes from its latents: query, key and value
    (Megatron-LM's mla_up_proj). experts: all but norms' results and the half of a layer that has experts (Megatron-LM's
    modules layernorm and moe). Names of operators: all but the results of these operators. A norm's result is kept as
    the input of products.
    """
    if policy == "stage":
        return 0.0
    if policy == "full":
        enter = next((o for o in chain if o.name == "attention enter"), None)
        return _input_bytes(chain, enter) if enter else sum(o.kept for o in chain)
    if policy == "selective":
        return sum(o.kept_result if o.name == "attention" else o.kept for o in chain)
    if policy == "latents":
        return sum(o.kept for o in chain if o.name not in _FROM_LATENTS)
    if policy == "experts":
        return sum(o.kept for o in chain if not _is_of_experts(o) and o.name not in _NORM_RESULTS) + sum(
            o.kept for o in chain if o.name == "norm before experts"
        )
    if policy in ("matmul", "kernel", "heads"):
        enter = next((o for o in chain if o.name == "attention enter"), None)
        single = (o for o in chain if not _is_grouped(o))
        product_elements = sum(p.batch * p.rows * p.columns for o in single for p in o.products if p.weight)
        attention_bytes = sum(o.kept_result for o in chain if o.name == "attention")
        products = HALF * product_elements / 2 * (policy == "matmul")
        products = products + sum(o.kept for o in chain if o.name in _HEADS and policy == "heads")
        return products + attention_bytes + (_input_bytes(chain, enter) if enter else 0.0)
    operators = named_operators(policy)
    recomputed = {
        o.layer_operator.gives
        for o in chain
        if o.recompute_unit in operators and o.layer_operator.gives is not o.layer_operator.takes
    }
    return sum(o.kept for o in chain if o.kept_tensor not in recomputed)


# Policies that compute operators again one by one, each just before it is used.
ONE_BY_ONE = ("none", "selective", "latents")
# Operators that give query, key and value.
_HEADS = ("qkv", "heads", "rotary")
# Operators that give them from latents: norms, products and the rotary positions.
_FROM_LATENTS = ("heads", "rotary")
# Operators that keep what a norm gave.
_NORM_RESULTS = ("attention enter", "mlp enter")
# Of the second half of a layer with experts.
_OF_EXPERTS = ("norm before experts", "router", "dispatch", "weigh", "combine")


def _is_of_experts(operator: Operator) -> bool:
    """True for an operator of the half of a layer that has experts."""
    return operator.name in _OF_EXPERTS or operator.name.startswith(("expert", "shared"))


def _is_grouped(operator: Operator) -> bool:
    """True for products of routed experts."""
    return operator.name.startswith("expert")


def _input_bytes(chain: Chain, enter: Operator) -> Numbers:
    """The bytes of a layer's input, kept once even if each of its products has a copy: a rank's part of it, which its
    first norm gives as large, also where the products keep what the ranks gathered."""
    return np.minimum(np.minimum(enter.kept, enter.given), chain[0].given)


def turn_bytes(chain: Chain, policy: str) -> Numbers:
    """Peak bytes that the backward of a layer needs in addition to the bytes that all of its operators kept, under a
    policy that recomputes operators one by one.

    From the last operator to the first, the bytes are: the gradients of the residual stream, of the operator's result
    and of its input, its inside bytes and the bytes recomputed for it, less the bytes that are free by then.
    """
    stream, peak, freed = chain[0].given, 0.0, 0.0
    for operator, producer in zip(reversed(chain), (*reversed(chain[:-1]), chain[0]), strict=True):
        kept = kept_bytes((operator,), policy) if policy in ONE_BY_ONE else operator.kept
        needed_bytes = stream + operator.given + producer.given + operator.inside + operator.kept - kept
        peak = np.maximum(peak, needed_bytes - freed - np.minimum(kept, operator.freed))
        freed = freed + kept
    return peak


def placeholder_elements(layers: Iterable[Chain]) -> Numbers:
    """Elements of one weight of each distinct shape in the products of these layers."""
    shapes: list[tuple[Numbers, Numbers]] = []
    total: Numbers = 0.0
    for p in (p for chain in layers for operator in chain for p in operator.products if p.weight):
        is_new: Numbers = 1.0
        for inner, columns in shapes:
            is_new = is_new * ((inner != p.inner) | (columns != p.columns))
        shapes.append((p.inner, p.columns))
        total = total + is_new * p.inner * p.columns
    return total


def share_run_again(operator: Operator, policy: str) -> float:
    """The share of an operator's forward that a policy computes again in the backward."""
    if operator.recompute_unit in ALWAYS_RECOMPUTED:
        return 1.0
    if policy in ALL_AGAIN:
        return 1.0
    if policy == "selective":
        return float(operator.name == "attention" and operator.scores is None)
    if policy == "latents":
        return float(operator.name in _FROM_LATENTS)
    if policy == "experts":
        return float(_is_of_experts(operator) or operator.recompute_unit == "norm")
    if policy in ("kernel", "heads"):
        is_kept = policy == "heads" and operator.name in _HEADS
        return float(operator.scores is None and not is_kept)
    if policy == "matmul":
        return 0.5 if operator.products and not _is_grouped(operator) else float(operator.scores is None)
    return float(operator.recompute_unit in named_operators(policy))
