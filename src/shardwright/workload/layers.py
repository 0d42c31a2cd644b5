"""Layers, embedding and head as lists of operators; what they keep under a policy; what they move in total.

Adding an operator is a function in operators.py and its place in a list here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.software import SoftwareSpec
from shardwright.workload import embedding_head as ends
from shardwright.workload import expert_operators as routed
from shardwright.workload import operators as op
from shardwright.workload.arrays import Numbers
from shardwright.workload.operators import HALF, Context, Operator
from shardwright.workload.query import PlanGrid

Chain = tuple[Operator, ...]
LAYERS = ("dense", "experts")  # kinds of pieces that are layers


def attention_block(c: Context) -> list[Operator]:
    """Norm, query, key and value, rotation, attention, output, sum."""
    latent = c.shape.latent
    made = [op.latents(c), op.heads_of_latents(c)] if latent else [op.queries_keys_values(c)]
    enter = op.enter_alone if latent and latent.query_rank else op.enter
    return [
        op.norm(c, "attention norm"), enter(c, "attention enter"), *made, op.rotate(c), op.attention(c),
        op.output(c), op.leave(c, "attention leave"), op.join(c, "attention join"),
    ]  # fmt: skip


def dense_layer(c: Context) -> Chain:
    """A layer with one MLP."""
    ffn = op.mlp(c, c.shape.ffn)
    return (
        *attention_block(c), op.norm(c, "mlp norm"), op.enter(c, "mlp enter"), *ffn, op.leave(c, "mlp leave"),
        op.join(c, "mlp join"),
    )  # fmt: skip


def expert_layer(c: Context) -> Chain:
    """A layer with a mixture of experts, and maybe experts that all tokens meet."""
    of = c.shape.experts
    assert of is not None, "a layer of experts needs some"
    shared: tuple[Operator, ...] = ()
    if of.shared_ffn:  # their input is what the router keeps
        enter = replace(op.enter(c, "shared enter"), kept=0.0)
        shared = (enter, *op.mlp(c, of.shared_ffn), op.leave(c, "shared leave"))
    return (
        *attention_block(c), op.norm(c, "norm before experts"), routed.route(c), routed.assemble(c),
        routed.trade(c, "dispatch"), *routed.experts(c), routed.trade(c, "combine"), routed.total(c), *shared,
        op.join(c, "mlp join"),
    )  # fmt: skip


def chains(shape: ModelShape, cut: PlanGrid, software: SoftwareSpec) -> dict[str, Chain]:
    """The operators of each kind of piece: dense and expert layers, embedding, head."""
    c = Context(shape, cut, software)
    found: dict[str, Chain] = {"dense": dense_layer(c)}
    if shape.experts:
        found["experts"] = expert_layer(c)
    found["embedding"] = (ends.embed(c),)
    found["head"] = (op.norm(c, "final norm"), op.enter(c, "head enter"), ends.head(c))
    if cut.element_bytes == HALF:
        return found
    return {kind: tuple(o.in_numbers_of(cut.element_bytes) for o in chain) for kind, chain in found.items()}


# By the name of what a plan recomputes: the operators here that run again, and those whose result it then need not
# keep. A product that runs again has its input gathered again. The result of a norm is kept as the input of the
# products behind it; that of the norm before experts is the router's too, and stays.
_RUN_AGAIN = {
    "norm": ("attention norm", "mlp norm"), "qkv": ("attention enter", "qkv"),
    "attention": ("heads", "rotary", "attention"), "up": ("mlp enter", "shared enter", "up"),
    "activation": ("activation",),
}  # fmt: skip
_NOT_KEPT = _RUN_AGAIN | {"norm": ("attention enter", "mlp enter"), "qkv": ("qkv",), "up": ("up",)}


def _named(table: Mapping[str, tuple[str, ...]], policy: str) -> set[str]:
    return {name for part in policy.split("+") for name in table.get(part, ())}


def kept_bytes(chain: Chain, policy: str) -> Numbers:
    """What a chain keeps of one microbatch from forward to backward under a policy of recomputation.

    Cut.recompute has the policies. full: the layer's input alone, which is what its first norm keeps in 16 bits. stage:
    nothing, for the stage keeps its input. selective: all but the attention core's scores (Korthikanti et al. 2022,
    section 5). matmul: what attention and every second product give, and the input (torchtitan's "selective op").
    """
    if policy == "stage":
        return 0.0
    if policy == "full":
        enter = next((o for o in chain if o.name == "attention enter"), None)
        return enter.kept if enter else sum(o.kept for o in chain)
    if policy == "selective":
        return sum(o.kept_result if o.name == "attention" else o.kept for o in chain)
    if policy == "matmul":
        enter = next((o for o in chain if o.name == "attention enter"), None)
        made = sum(p.batch * p.rows * p.columns for o in chain for p in o.products if p.weight)
        given = sum(o.kept_result for o in chain if o.name == "attention")
        return HALF * made / 2 + given + (enter.kept if enter else 0.0)
    dropped = _named(_NOT_KEPT, policy)
    return sum(o.kept for o in chain if o.name not in dropped)


def turn_bytes(chain: Chain, policy: str) -> Numbers:
    """Most bytes at once that the backward of a layer needs beside what all of its operators kept, under a policy that
    runs operators again one by one.

    From the last operator to the first: the gradients of the residual stream, of an operator's result and of what it
    takes, what it needs inside and what is made again for it, less what is free by then.
    """
    stream, most, free = chain[0].given, 0.0, 0.0
    for operator, before in zip(reversed(chain), (*reversed(chain[:-1]), chain[0]), strict=True):
        kept = kept_bytes((operator,), policy) if policy in ("none", "selective") else operator.kept
        needed = stream + operator.given + before.given + operator.inside + operator.kept - kept
        most = np.maximum(most, needed - free - np.minimum(kept, operator.freed))
        free = free + kept
    return most


def placeholder_elements(layers: Iterable[Chain]) -> Numbers:
    """Elements of one weight of each shape that products of these layers have."""
    shapes: list[tuple[Numbers, Numbers]] = []
    found: Numbers = 0.0
    for p in (p for chain in layers for operator in chain for p in operator.products if p.weight):
        is_new: Numbers = 1.0
        for inner, columns in shapes:
            is_new = is_new * ((inner != p.inner) | (columns != p.columns))
        shapes.append((p.inner, p.columns))
        found = found + is_new * p.inner * p.columns
    return found


def share_run_again(operator: Operator, policy: str) -> float:
    """What share of an operator's forward a policy computes again in the backward."""
    if policy in ("full", "stage"):
        return 1.0
    if policy == "selective":
        return float(operator.name == "attention" and operator.scores is None)
    if policy == "matmul":
        return 0.5 if operator.products else float(operator.scores is None)
    return float(operator.name in _named(_RUN_AGAIN, policy))
