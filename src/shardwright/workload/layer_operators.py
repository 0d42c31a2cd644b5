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
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape


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
# Parts that our runtime always computes again, whatever a policy says: they are cheap beside what they give.
ALWAYS_AGAIN = frozenset({"weigh"})


@lru_cache(maxsize=64)
def attention_operators(shape: ModelShape) -> Operators:
    """The first half of any layer, up to what joins the residual stream. In a parallel block it gives a part of what
    the second one gives, before the sum over tp, and with one norm the product into the MLP is here too."""
    takes = "attention normal" if shape.norms_before else "input"
    part = "norm" if shape.parallel != "one-norm" else "norm of both"
    norm = LayerOperator("attention norm", part, "input", "attention normal")
    gives = "whole attention output" if shape.parallel == "none" else "whole output"
    made = (
        *((norm,) if shape.norms_before else ()),
        *(_latent(shape, takes) if shape.latent else _grouped(shape, takes)),
        LayerOperator("attention", "attention", "query, key and value", "attended"),
        _product("out", "output", shape.attention_matrices[-1], "attended", gives),
    )
    if shape.parallel != "none":
        return made
    leave = LayerOperator("attention leave", "output", gives, "attention output")
    return (*made, leave, *_out_norm(shape, "attention", "attention output"))


def _out_norm(shape: ModelShape, half: str, takes: str) -> Operators:
    """The norm of what a half of a layer gives, which no policy names: it is added, and an addition keeps nothing."""
    norm = LayerOperator(f"{half} out norm", "out norm", takes, f"normal {half} output")
    return (norm,) if shape.norms_after else ()


def _grouped(shape: ModelShape, takes: str) -> Operators:
    """Query, key and value in one product, and their rotation. Beside it, with one norm for both halves of a layer, the
    product into the MLP."""
    whole = f"whole {takes}"
    part = "qkv" if shape.parallel != "one-norm" else "both"
    up = _product("up", part, shape.mlp_matrices[0], whole, "up")
    return (
        LayerOperator("attention enter", part, takes, whole),
        *((up,) if part == "both" else ()),
        _product("qkv", part, shape.attention_matrices[0], whole, "qkv"),
        LayerOperator("rotary", "attention", "qkv", "query, key and value"),
    )


def _latent(shape: ModelShape, takes: str) -> Operators:
    """Through low ranks: latents, and the heads made of them. Without low-rank queries, these are made with the
    latents, by each tensor-parallel rank from the whole sequence."""
    down, q_up, kv_up, _ = shape.attention_matrices
    made, heads = "made keys and values", "query, key and value"
    rotary = LayerOperator("rotary", "attention", heads, heads)
    if not shape.low_ranks.query_rank:
        whole = f"whole {takes}"
        products = WeightProduct(q_up, whole, "query"), WeightProduct(down, whole, "whole latents")
        of_keys = WeightProduct(kv_up, "normal keys' latent", made)
        return (
            LayerOperator("attention enter", "qkv", takes, whole),
            LayerOperator("qkv", "qkv", whole, "projected", products),
            LayerOperator("heads", "attention", "projected", heads, (of_keys,)),
            rotary,
        )
    products = WeightProduct(q_up, "whole latents", "query"), WeightProduct(kv_up, "whole latents", made)
    return (
        LayerOperator("attention enter", "qkv", takes, takes),
        _product("qkv", "qkv", down, takes, "latents"),
        LayerOperator("heads", "attention", "latents", heads, products),
        rotary,
    )


@lru_cache(maxsize=64)
def mlp_operators(shape: ModelShape) -> Operators:
    """The second half of a dense layer. In a parallel block it takes what the first one takes, and the sums of both
    leave together."""
    leave = LayerOperator("mlp leave", "down", "whole output", "mlp output")
    if shape.parallel == "one-norm":
        _, *rest = _mlp("", shape.mlp_matrices, "", "whole output")
        return (*rest, leave)
    before = "middle" if shape.parallel == "none" else "input"
    takes = "mlp normal" if shape.norms_before else before
    return (
        *((LayerOperator("mlp norm", "norm", before, takes),) if shape.norms_before else ()),
        LayerOperator("mlp enter", "up", takes, f"whole {takes}"),
        *_mlp("", shape.mlp_matrices, f"whole {takes}", "whole output"),
        leave,
        *_out_norm(shape, "mlp", "mlp output"),
    )


@lru_cache(maxsize=64)
def routed_operators(shape: ModelShape) -> Operators:
    """The second half of a layer with experts, but for those that all tokens meet. No policy names its norm, whose
    result several operators need. Where weights meet what experts take, that is always computed again."""
    takes = "mlp normal" if shape.norms_before else "middle"
    choice = WeightProduct(shape.gate_matrices[0], takes, "logits")
    weighs = shape.mixture.weighs_input
    rows = "weighed rows" if weighs else "dispatched"
    norm = LayerOperator("norm before experts", "norm before experts", "middle", takes)
    return (
        *((norm,) if shape.norms_before else ()),
        LayerOperator("router", "router", takes, "weights", (choice,)),
        LayerOperator("experts enter", "dispatch", takes, takes),
        LayerOperator("dispatch", "dispatch", takes, "dispatched"),
        *((LayerOperator("weigh", "weigh", "dispatched", rows),) if weighs else ()),
        *_mlp("expert ", shape.routed_matrices, rows, "expert output"),
        LayerOperator("combine", "combine", "expert output", "routed output"),
        LayerOperator("experts leave", "combine", "routed output", "routed output"),
        *(() if shape.mixture.shared_ffn else _out_norm(shape, "mlp", "routed output")),
    )


@lru_cache(maxsize=64)
def shared_operators(shape: ModelShape) -> Operators:
    """The experts that all tokens meet, if there are any: one MLP, whose input is the router's too, and its gate."""
    mixture = shape.experts
    if mixture is None or not mixture.shared_ffn:
        return ()
    takes = "mlp normal" if shape.norms_before else "middle"
    gate = tuple(
        LayerOperator("shared gate", "gate", "shared output", "gated output", (product,))
        for product in (WeightProduct(m, takes, "shared gate logits") for m in shape.gate_matrices[1:])
    )
    return (
        LayerOperator("shared enter", "up", takes, f"whole {takes}"),
        *_mlp("shared ", shape.shared_matrices, f"whole {takes}", "whole shared output"),
        LayerOperator("shared leave", "down", "whole shared output", "shared output"),
        *gate,
        *_out_norm(shape, "mlp", "gated output" if gate else "shared output"),
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
            look_up = LayerOperator("embedding", "embedding", "tokens", "input")
            norm = LayerOperator("embedding norm", "embedding norm", "input", "input")
            return (look_up, norm) if shape.embedding_norm else (look_up,)
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
    first, end = attention_operators(shape), LayerOperator("mlp join", "join", half[-1].gives, "output")
    if shape.parallel != "none":
        return (*first, *half, end)
    return (*first, LayerOperator("attention join", "join", first[-1].gives, "middle"), *half, end)


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
