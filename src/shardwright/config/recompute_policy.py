"""The recomputation of a layer: names of its operators, and those that each layer of a plan recomputes.

A block is two chains, each ended by a product whose output joins the residual stream:

    norm -> qkv -> attention -> [output product]        norm -> up -> activation -> [down product]

The two products at the ends are never computed again: what they give is added, and an addition keeps nothing.
"""

from typing import Literal, get_args

# norm: both norms. qkv: the product that makes queries, keys and values. attention: biases, norms of heads, rotary and
# softmax(QK^T)V. up: the product(s) into the MLP. activation: its bias, activation and gating. Of latent attention qkv
# is the product that makes the latents (without low-rank queries also the queries), and attention all that follows:
# norms of the latents, and the products that make heads of them.
OperatorName = Literal["norm", "qkv", "attention", "up", "activation"]
OPERATORS: tuple[str, ...] = get_args(OperatorName)
RecomputedName = Literal["norm", "qkv", "attention", "up", "activation", "layer"]

# What a layer recomputes: names of operators; or LAYER alone, where only the layer's input is kept.
Policy = frozenset[str]
LAYER = "layer"
KEEP_ALL: Policy = frozenset()
WHOLE_LAYER: Policy = frozenset({LAYER})

# What a product gives is needed by the operator after it alone: to recompute the product without that frees nothing.
NEEDS = {"qkv": "attention", "up": "activation"}


def policy_faults(field: str, policy: Policy) -> list[str]:
    """Faults in the names of one layer's policy, as `field` of a plan has them."""
    if LAYER in policy and len(policy) > 1:
        others = ", ".join(sorted(policy - {LAYER}))
        return [f"{field} has {LAYER!r} and {others}: a layer that keeps its input alone has no operators left to name"]
    return [
        f"{field} has {product!r} without {follower!r}: what {product} gives is needed by {follower} alone, so "
        f"computing it again frees nothing; add {follower!r}, or leave {product!r} out"
        for product, follower in NEEDS.items()
        if product in policy and follower not in policy
    ]
