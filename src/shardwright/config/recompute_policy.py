"""The recomputation of a layer: the names of its operators, and the operators that each layer of a plan recomputes.

A block is two chains, each ended by a product whose output joins the residual stream:

    norm -> qkv -> attention -> [output product]        norm -> up -> activation -> [down product]

The two products at the ends are never recomputed: their outputs are added, and an addition keeps nothing.
"""

from typing import Literal, get_args

from shardwright.config.phrase import say

# norm: both norms. qkv: the product that makes queries, keys and values. attention: biases, norms of heads, rotary and
# softmax(QK^T)V. up: the product(s) into the MLP. activation: its bias, activation and gating. In latent attention, qkv
# is the product that makes the latents (without low-rank queries also the queries), and attention is all that follows:
# norms of the latents, and the products that make heads from them.
OperatorName = Literal["norm", "qkv", "attention", "up", "activation"]
OPERATORS: tuple[str, ...] = get_args(OperatorName)
RecomputedName = Literal["norm", "qkv", "attention", "up", "activation", "layer"]

# The operators that a layer recomputes; or only LAYER, if just the layer's input is kept.
Policy = frozenset[str]
LAYER = "layer"
KEEP_ALL: Policy = frozenset()
WHOLE_LAYER: Policy = frozenset({LAYER})
ALL_AGAIN = ("full", "stage")  # values of plan.recompute by which every operator is computed again

# Only the next operator needs the output of a product, so recomputing the product without that operator frees nothing.
NEEDS = {"qkv": "attention", "up": "activation"}


def policy_faults(field: str, policy: Policy) -> list[str]:
    """Faults in the names of one layer's policy, from the field `field` of a plan."""
    if LAYER in policy and len(policy) > 1:
        others = ", ".join(sorted(policy - {LAYER}))
        return [
            say(
                "{field} has {layer} and {others}: a layer that keeps its input alone has no operators left to name",
                field=field,
                layer=repr(LAYER),
                others=others,
            )
        ]
    return [
        say(
            "{field} has {product} without {follower}: what {operator} gives is needed by {reader} alone, so "
            "computing it again frees nothing; add {follower}, or leave {product} out",
            field=field,
            product=repr(product),
            follower=repr(follower),
            operator=product,
            reader=follower,
        )
        for product, follower in NEEDS.items()
        if product in policy and follower not in policy
    ]
