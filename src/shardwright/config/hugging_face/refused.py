"""Reasons why families can't be expressed by the decoder here, and ways out. refused.toml has the families of each."""

import tomllib
from functools import cache
from importlib import resources

from shardwright.config.phrase import say

_OTHER = say("use a family that docs/hugging-face.md names, or give a shape near it as fields of [model]")
# By the name of a reason; others have the way out above.
_WAYS_OUT = {
    "indexer": say(
        'in sequences of at most index_topk tokens it chooses all: to plan these, set model_type to "deepseek_v3", and '
        "leave out layer_types, mlp_layer_types and the keys that begin with index"
    ),
    "learned-activation": say(
        'relu2 takes the same widths: to plan these, set model_type to "arcee" and hidden_act to "relu2", leave out '
        "qk_norm and post_norm, and say --set model.qk_norm=head; two numbers a layer are then not counted"
    ),
}
REASONS = {
    "state-spaces": say("its layers have state spaces (Mamba)"),
    "recurrent": say("its layers have linear attention or recurrences"),
    "convolutions": say("its layers have convolutions over tokens"),
    "indexer": say("attention is sparse: an indexer with weights of its own chooses the keys of each query"),
    "other-indexers": say("attention is sparse: an indexer with weights of its own chooses the keys of each query"),
    "encoders": say("it has an encoder, or tokens that see later ones"),
    "several-inputs": say("it has several kinds of input, and no decoder of text that is read"),
    "gated-attention": say("what attention gives is multiplied by a gate"),
    "widths-of-heads": say("its layers have heads of several widths, and embeddings of tokens of their own"),
    "shapes-of-layers": say("layers have several shapes"),
    "learned-activation": say("the activation has weights of its own (xIELU)"),
    "sines": say("positions are sines that are added to embeddings"),
    "norms-behind-sums": say("norms stand behind the sum with the residual stream"),
    "last-bias": say("of the matrices of attention only the last has biases"),
    "layer-norms-of-heads": say("norms of heads are LayerNorms"),
    "norms-of-experts": say("norms of experts are of layers with experts alone"),
    "beside-experts": say("attention stands beside experts"),
    "ternary": say("weights are ternary, and norms stand within attention and MLP"),
    "bytes": say("its tokens are bytes that are gathered into patches"),
    "four-devices": say("the rows of its matrix of query, key and value stand in an order of four devices"),
    "windows": say("windows lie where no rule of first_full and full_every has them"),
    "relative-positions": say("a bias of relative positions is learned"),
    "tensors-of-experts": say("tensors of experts are laid out in a way that is not read"),
    "two-softmaxes": say("attention is the difference of two softmaxes"),
    "masks": say("a learned mask leaves keys out"),
    "repeated-layers": say("its layers are run several times"),
    "experts-of-attention": say("attention has experts"),
    "biased-logits": say("experts are chosen by logits and biases, and weighed by sigmoids"),
    "double-layers": say("a layer has attention twice, and experts that compute nothing"),
    "halves-of-latents": say("pairs that turn are halves of a head, and neighbours where attention has latents"),
    "head-matrix": say("its head has a matrix more"),
    "other-turn": say("pairs turn the other way round"),
    "one-after-the-other": say("experts are chosen one after the other, by a softmax each"),
}


@cache
def refused_families() -> dict[str, str]:
    """The name of the reason for which a family can't be expressed, by model_type."""
    families = tomllib.loads((resources.files(__package__) / "refused.toml").read_text(encoding="utf-8"))
    return {family: name for name, of_reason in families.items() for family in of_reason}


def refusal_of(family: str) -> tuple[str, str] | None:
    """(reason, way out) for a family that can't be expressed; None if nothing is known of it."""
    name = refused_families().get(family)
    return None if name is None else (REASONS[name], _WAYS_OUT.get(name, _OTHER))
