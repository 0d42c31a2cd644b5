"""The operators of a layer, in order: the one list that the predictions and the account of memory follow.

Each operator takes one tensor and gives one, whose sizes are in tensor_sizes.py. An *enter* gathers the sequence shards
of tensor parallel, a *leave* reduces the partial sums. A *whole* tensor has all tokens of the part of the sequence that
tensor-parallel ranks share, and a whole output is a partial sum.

Other files add what an operator moves, exchanges and keeps with a software generation: operators.py for predictions,
from a description of the software; memory/kept_tensors.py and its users for our own runtime, exactly.
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
    """One operator: the tensor that it takes and the tensor that it gives, and its products with weights.

    `recompute_unit` names the group of adjacent operators that a recomputation policy recomputes together: the policy's
    name for them (config/recompute_policy.py), or ours if no policy has one. An operator that gives what it takes makes
    no new tensor.
    """

    name: str
    recompute_unit: str
    takes: str
    gives: str
    products: tuple[WeightProduct, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that it and its products take and give."""
        return (self.takes, self.gives, *(name for p in self.products for name in (p.takes, p.gives)))


Operators = tuple[LayerOperator, ...]
# Units that our runtime recomputes under any policy: they cost little compute and would store a large tensor.
ALWAYS_RECOMPUTED = frozenset({"weigh"})


@lru_cache(maxsize=64)
def attention_operators(shape: ModelShape) -> Operators:
    """The first half of any layer, up to the input of the residual sum. In a parallel block it gives a part of the same
    tensor as the second half, before the sum over tp; with one norm the product into the MLP is here too."""
    takes = "attention normal" if shape.norms_before else "input"
    unit = "norm" if shape.parallel != "one-norm" else "norm of both"
    norm = LayerOperator("attention norm", unit, "input", "attention normal")
    gives = "whole attention output" if shape.parallel == "none" else "whole output"
    operators = (
        *((norm,) if shape.norms_before else ()),
        *(_latent(shape, takes) if shape.latent else _grouped(shape, takes)),
        LayerOperator("attention", "attention", "query, key and value", "attended"),
        _product("out", "output", shape.attention_matrices[-1], "attended", gives),
    )
    if shape.parallel != "none":
        return operators
    leave = LayerOperator("attention leave", "output", gives, "attention output")
    return (*operators, leave, *_out_norm(shape, "attention", "attention output"))


def _out_norm(shape: ModelShape, half: str, takes: str) -> Operators:
    """The norm of the output of a half of a layer. No policy names it: its result is added, and a sum keeps nothing."""
    norm = LayerOperator(f"{half} out norm", "out norm", takes, f"normal {half} output")
    return (norm,) if shape.norms_after else ()


def _grouped(shape: ModelShape, takes: str) -> Operators:
    """Query, key and value in one product, and their rotation. If both halves of a layer have one norm, the product
    into the MLP is here too."""
    gathered = f"whole {takes}"
    unit = "qkv" if shape.parallel != "one-norm" else "both"
    up = _product("up", unit, shape.mlp_matrices[0], gathered, "up")
    return (
        LayerOperator("attention enter", unit, takes, gathered),
        *((up,) if unit == "both" else ()),
        _product("qkv", unit, shape.attention_matrices[0], gathered, "qkv"),
        LayerOperator("rotary", "attention", "qkv", "query, key and value"),
    )


def _latent(shape: ModelShape, takes: str) -> Operators:
    """Multi-head latent attention (MLA): down projection to latents, then up projection to heads. Without low-rank
    queries, each tensor-parallel rank computes the queries and the latents from the gathered sequence."""
    down_matrix, q_up, kv_up, _ = shape.attention_matrices
    keys_and_values, heads = "made keys and values", "query, key and value"
    rotary = LayerOperator("rotary", "attention", heads, heads)
    if not shape.low_ranks.query_rank:
        gathered = f"whole {takes}"
        products = WeightProduct(q_up, gathered, "query"), WeightProduct(down_matrix, gathered, "whole latents")
        key_product = WeightProduct(kv_up, "normal keys' latent", keys_and_values)
        return (
            LayerOperator("attention enter", "qkv", takes, gathered),
            LayerOperator("qkv", "qkv", gathered, "projected", products),
            LayerOperator("heads", "attention", "projected", heads, (key_product,)),
            rotary,
        )
    products = WeightProduct(q_up, "whole latents", "query"), WeightProduct(kv_up, "whole latents", keys_and_values)
    return (
        LayerOperator("attention enter", "qkv", takes, takes),
        _product("qkv", "qkv", down_matrix, takes, "latents"),
        LayerOperator("heads", "attention", "latents", heads, products),
        rotary,
    )


@lru_cache(maxsize=64)
def mlp_operators(shape: ModelShape) -> Operators:
    """The second half of a dense layer. In a parallel block it has the same input as the first half, and the sums of
    both leave together."""
    leave = LayerOperator("mlp leave", "down", "whole output", "mlp output")
    if shape.parallel == "one-norm":
        # The up projection is fused with QKV in attention_operators; drop it here.
        _, *operators = _mlp("", shape.mlp_matrices, "", "whole output")
        return (*operators, leave)
    stream = "middle" if shape.parallel == "none" else "input"
    takes = "mlp normal" if shape.norms_before else stream
    return (
        *((LayerOperator("mlp norm", "norm", stream, takes),) if shape.norms_before else ()),
        LayerOperator("mlp enter", "up", takes, f"whole {takes}"),
        *_mlp("", shape.mlp_matrices, f"whole {takes}", "whole output"),
        leave,
        *_out_norm(shape, "mlp", "mlp output"),
    )


@lru_cache(maxsize=64)
def routed_operators(shape: ModelShape) -> Operators:
    """The second half of a layer with experts, without the shared ones. No policy names its norm, whose result several
    operators need. If weights multiply the input of experts, that product is always recomputed."""
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
    """The shared experts, which all tokens meet, if there are any: one MLP with the router's input, and its gate."""
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


def _product(name: str, unit: str, matrix: Matrix, takes: str, gives: str) -> LayerOperator:
    return LayerOperator(name, unit, takes, gives, (WeightProduct(matrix, takes, gives),))


@lru_cache(maxsize=64)
def piece_operators(shape: ModelShape, kind: str) -> Operators:
    """The operators of a piece of the model: a layer of a kind (config/model_shape.py), the "embedding", the "head", or
    "mtp", which is a module that predicts a further token, without its block."""
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
    attention, end = attention_operators(shape), LayerOperator("mlp join", "join", half[-1].gives, "output")
    if shape.parallel != "none":
        return (*attention, *half, end)
    return (*attention, LayerOperator("attention join", "join", attention[-1].gives, "middle"), *half, end)


def _head() -> Operators:
    """A norm, the product with the vocabulary and the loss."""
    return (
        LayerOperator("final norm", "final norm", "final input", "final normal"),
        LayerOperator("head enter", "head", "final normal", "whole final normal"),
        LayerOperator("head", "head", "whole final normal", "loss"),
    )


def by_recompute_unit(operators: Iterable[LayerOperator]) -> Iterator[tuple[str, Operators]]:
    """Groups of adjacent operators that are recomputed together, each with the name of its recompute unit."""
    for unit, operators_of_unit in groupby(operators, key=lambda operator: operator.recompute_unit):
        yield unit, tuple(operators_of_unit)
