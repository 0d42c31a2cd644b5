"""The operators of a layer, in their order: the one list, which predictions cost and the account of memory follows.

Each takes one tensor and gives one, whose sizes are in tensor_sizes.py. What an operator moves, exchanges and keeps
with some generation of software is laid over it: for predictions in operators.py, from a description of the software;
for our own runtime, exactly, in account/kept_tensors.py and what uses it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from shardwright.config.layer_kind import has_experts
from shardwright.config.model_shape import Matrix, ModelShape


@dataclass(frozen=True)
class WeightProduct:
    """A product with a weight, from one tensor to another."""

    matrix: Matrix
    takes: str
    gives: str


@dataclass(frozen=True)
class LayerOperator:
    """One operator: the tensor that it takes and the one that it gives, and its products with weights.

    `part` is what a policy of recomputation calls it with its neighbours (config/recompute_policy.py), or what they are
    together where none does. One that gives what it takes makes nothing new.
    """

    name: str
    part: str
    takes: str
    gives: str
    products: tuple[WeightProduct, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that it and its products take and give."""
        return (self.takes, self.gives, *(name for p in self.products for name in (p.takes, p.gives)))


Operators = tuple[LayerOperator, ...]


@lru_cache(maxsize=64)
def attention_operators(shape: ModelShape) -> Operators:
    """The first half of any layer, up to the product whose result joins the residual stream."""
    return (
        LayerOperator("attention norm", "norm", "input", "attention normal"),
        *(_latent(shape) if shape.latent else _grouped(shape)),
        LayerOperator("attention", "attention", "query, key and value", "attended"),
        _product("out", "output", shape.attention_matrices[-1], "attended", "whole middle"),
        LayerOperator("attention leave", "output", "whole middle", "attention output"),
    )


def _grouped(shape: ModelShape) -> Operators:
    """Query, key and value in one product, and their rotation."""
    return (
        LayerOperator("attention enter", "qkv", "attention normal", "whole attention normal"),
        _product("qkv", "qkv", shape.attention_matrices[0], "whole attention normal", "qkv"),
        LayerOperator("rotary", "attention", "qkv", "query, key and value"),
    )


def _latent(shape: ModelShape) -> Operators:
    """Through low ranks: latents, and the heads made of them. Without low-rank queries, these are made with the
    latents, by each tensor-parallel rank from the whole sequence."""
    down, q_up, kv_up, _ = shape.attention_matrices
    made, heads = "made keys and values", "query, key and value"
    rotary = LayerOperator("rotary", "attention", heads, heads)
    if not shape.low_ranks.query_rank:
        whole = "whole attention normal"
        products = WeightProduct(q_up, whole, "query"), WeightProduct(down, whole, "whole latents")
        of_keys = WeightProduct(kv_up, "normal keys' latent", made)
        return (
            LayerOperator("attention enter", "qkv", "attention normal", whole),
            LayerOperator("qkv", "qkv", whole, "projected", products),
            LayerOperator("heads", "attention", "projected", heads, (of_keys,)),
            rotary,
        )
    products = WeightProduct(q_up, "whole latents", "query"), WeightProduct(kv_up, "whole latents", made)
    return (
        LayerOperator("attention enter", "qkv", "attention normal", "attention normal"),
        _product("qkv", "qkv", down, "attention normal", "latents"),
        LayerOperator("heads", "attention", "latents", heads, products),
        rotary,
    )


@lru_cache(maxsize=64)
def mlp_operators(shape: ModelShape) -> Operators:
    """The second half of a dense layer."""
    return (
        LayerOperator("mlp norm", "norm", "middle", "mlp normal"),
        LayerOperator("mlp enter", "up", "mlp normal", "whole mlp normal"),
        *_mlp("", shape.mlp_matrices, "whole mlp normal", "whole output"),
        LayerOperator("mlp leave", "down", "whole output", "mlp output"),
    )


@lru_cache(maxsize=64)
def routed_operators(shape: ModelShape) -> Operators:
    """The second half of a layer with experts, but for those that all tokens meet. No policy names its norm, whose
    result several operators need."""
    choice = WeightProduct(shape.gate_matrices[0], "mlp normal", "logits")
    return (
        LayerOperator("norm before experts", "norm before experts", "middle", "mlp normal"),
        LayerOperator("router", "router", "mlp normal", "weights", (choice,)),
        LayerOperator("experts enter", "dispatch", "mlp normal", "mlp normal"),
        LayerOperator("dispatch", "dispatch", "mlp normal", "dispatched"),
        *_mlp("expert ", shape.routed_matrices, "dispatched", "expert output"),
        LayerOperator("combine", "combine", "expert output", "routed output"),
        LayerOperator("experts leave", "combine", "routed output", "routed output"),
    )


@lru_cache(maxsize=64)
def shared_operators(shape: ModelShape) -> Operators:
    """The experts that all tokens meet, if there are any: one MLP, whose input is the router's too, and its gate."""
    of = shape.experts
    if of is None or not of.shared_ffn:
        return ()
    gate = tuple(
        LayerOperator("shared gate", "gate", "shared output", "gated output", (product,))
        for product in (WeightProduct(m, "mlp normal", "shared gate logits") for m in shape.gate_matrices[1:])
    )
    return (
        LayerOperator("shared enter", "up", "mlp normal", "whole mlp normal"),
        *_mlp("shared ", shape.shared_matrices, "whole mlp normal", "whole shared output"),
        LayerOperator("shared leave", "down", "whole shared output", "shared output"),
        *gate,
    )


def _mlp(prefix: str, matrices: tuple[Matrix, Matrix], takes: str, gives: str) -> Operators:
    """Up (and gate), activation, down."""
    up, inner = f"{prefix}up", f"{prefix}inner"
    return (
        _product(up, "up", matrices[0], takes, up),
        LayerOperator(f"{prefix}activation", "activation", up, inner),
        _product(f"{prefix}down", "down", matrices[1], inner, gives),
    )


def _product(name: str, part: str, matrix: Matrix, takes: str, gives: str) -> LayerOperator:
    return LayerOperator(name, part, takes, gives, (WeightProduct(matrix, takes, gives),))


@lru_cache(maxsize=64)
def piece_operators(shape: ModelShape, kind: str) -> Operators:
    """The operators of a piece of the model: of a layer of a kind (config/model_shape.py), of the "embedding" or the
    "head", or of "mtp": what predicts a further token, but for its block."""
    match kind:
        case "embedding":
            return (LayerOperator("embedding", "embedding", "tokens", "input"),)
        case "head":
            return _head()
        case "mtp":
            return (
                LayerOperator("embedding", "embedding", "tokens", "embedded"),
                LayerOperator("embedding norm", "before block", "embedded", "embedded"),
                LayerOperator("hidden norm", "before block", "input", "input"),
                _product("project", "before block", shape.further_matrix, "joined", "input"),
                *_head(),
            )
    half = routed_operators(shape) + shared_operators(shape) if has_experts(kind) else mlp_operators(shape)
    join = LayerOperator("attention join", "join", "attention output", "middle")
    return (*attention_operators(shape), join, *half, LayerOperator("mlp join", "join", half[-1].gives, "output"))


def _head() -> Operators:
    """A norm, the product with the vocabulary and the loss."""
    return (
        LayerOperator("final norm", "final norm", "final input", "final normal"),
        LayerOperator("head enter", "head", "final normal", "whole final normal"),
        LayerOperator("head", "head", "whole final normal", "loss"),
    )


def by_part(operators: Iterable[LayerOperator]) -> Iterator[tuple[str, Operators]]:
    """Operators that stand side by side and are one part."""
    for part, some in groupby(operators, key=lambda operator: operator.part):
        yield part, tuple(some)
