"""The operators of a layer, in order: the one list that the predictions and the account of memory follow.

Each operator takes one tensor and gives one; layer_tensors.py has the tensors and their sizes. An *enter* gathers the
sequence shards of tensor parallel, a *leave* reduces the partial sums. A *gathered* tensor has all tokens of the part
of the sequence that tensor-parallel ranks share; so has a partial sum.

Other files add what an operator moves, exchanges and keeps with a software generation: operators.py for predictions,
from a description of the software; memory/kept_tensors.py and its users for our own runtime, exactly.
"""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal

from shardwright.config.layer_kind import has_experts
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape
from shardwright.config.recompute_policy import OperatorName
from shardwright.layers.layer_tensors import (
    ATTENTION,
    BLOCK,
    ENDS,
    EXPERT_MLP,
    LATENT,
    MLP,
    ROUTING,
    SHARED_MLP,
    LayerTensor,
    MlpTensors,
    ShardedTensor,
)

# The groups of adjacent operators that are recomputed together: those that a policy names, others of layers, those of
# layers with experts, and those of other pieces.
RecomputeUnit = (
    OperatorName
    | Literal["norm of both", "both", "output", "out norm", "join", "down"]
    | Literal["norm before experts", "router", "dispatch", "weigh", "combine", "gate"]
    | Literal["embedding", "embedding norm", "before block", "final norm", "head"]
)


@dataclass(frozen=True)
class WeightProduct:
    """A product with a weight, from one tensor to another."""

    matrix: Matrix
    _: KW_ONLY
    takes: LayerTensor
    gives: LayerTensor


@dataclass(frozen=True)
class LayerOperator:
    """One operator: the tensor that it takes and the tensor that it gives, and its products with weights.

    `recompute_unit` is the group of adjacent operators with which it is recomputed. An operator that gives what it
    takes makes no new tensor.
    """

    name: str
    recompute_unit: RecomputeUnit
    _: KW_ONLY
    takes: LayerTensor
    gives: LayerTensor
    products: tuple[WeightProduct, ...] = ()

    @property
    def is_of_routed_experts(self) -> bool:
        """True if it has a row for each token that chose an expert of the rank: the MLP of routed experts."""
        return self.gives in (EXPERT_MLP.up, EXPERT_MLP.inner, EXPERT_MLP.product_out)


Operators = tuple[LayerOperator, ...]
# Units that our runtime recomputes under any policy: they cost little compute and would store a large tensor.
ALWAYS_RECOMPUTED = frozenset({"weigh"})


@lru_cache(maxsize=64)
def attention_operators(shape: ModelShape) -> Operators:
    """The first half of any layer, up to the input of the residual sum. In a parallel block it gives a part of the same
    tensor as the second half, before the sum over tp; with one norm the product into the MLP is here too."""
    takes = BLOCK.attention_norm_out if shape.norms_before else BLOCK.input
    unit: RecomputeUnit = "norm" if shape.parallel != "one-norm" else "norm of both"
    norm = LayerOperator("attention norm", unit, takes=BLOCK.input, gives=BLOCK.attention_norm_out)
    gives = ATTENTION.product_out if shape.parallel == "none" else MLP.product_out
    operators = (
        *((norm,) if shape.norms_before else ()),
        *(_latent(shape, takes) if shape.latent else _grouped(shape, takes)),
        LayerOperator("attention", "attention", takes=ATTENTION.heads, gives=ATTENTION.attended),
        _product("out", "output", shape.attention_matrices[-1], takes=ATTENTION.attended, gives=gives),
    )
    if shape.parallel != "none":
        return operators
    leave = LayerOperator("attention leave", "output", takes=gives, gives=BLOCK.attention_out)
    out_norm = LayerOperator(
        "attention out norm", "out norm", takes=BLOCK.attention_out, gives=BLOCK.attention_out_norm_out
    )
    return (*operators, leave, *((out_norm,) if shape.norms_after else ()))


def _grouped(shape: ModelShape, takes: ShardedTensor) -> Operators:
    """Query, key and value in one product, and their rotation. If both halves of a layer have one norm, the product
    into the MLP is here too."""
    unit: RecomputeUnit = "qkv" if shape.parallel != "one-norm" else "both"
    up = _product("up", unit, shape.mlp_matrices[0], takes=takes.gathered, gives=MLP.up)
    return (
        LayerOperator("attention enter", unit, takes=takes, gives=takes.gathered),
        *((up,) if unit == "both" else ()),
        _product("qkv", unit, shape.attention_matrices[0], takes=takes.gathered, gives=ATTENTION.qkv),
        LayerOperator("rotary", "attention", takes=ATTENTION.qkv, gives=ATTENTION.heads),
    )


def _latent(shape: ModelShape, takes: ShardedTensor) -> Operators:
    """Multi-head latent attention (MLA): down projection to latents, then up projection to heads. Without low-rank
    queries, each tensor-parallel rank computes the queries and the latents from the gathered sequence."""
    down, q_up, kv_up, _ = shape.attention_matrices
    rotary = LayerOperator("rotary", "attention", takes=ATTENTION.heads, gives=ATTENTION.heads)
    if not shape.low_ranks.query_rank:
        products = (
            WeightProduct(q_up, takes=takes.gathered, gives=LATENT.query),
            WeightProduct(down, takes=takes.gathered, gives=LATENT.latents.gathered),
        )
        key_product = WeightProduct(kv_up, takes=LATENT.key_latent_norm_out, gives=LATENT.key_and_value)
        return (
            LayerOperator("attention enter", "qkv", takes=takes, gives=takes.gathered),
            LayerOperator("qkv", "qkv", takes=takes.gathered, gives=LATENT.projected, products=products),
            LayerOperator("heads", "attention", takes=LATENT.projected, gives=ATTENTION.heads, products=(key_product,)),
            rotary,
        )
    products = (
        WeightProduct(q_up, takes=LATENT.latents.gathered, gives=LATENT.query),
        WeightProduct(kv_up, takes=LATENT.latents.gathered, gives=LATENT.key_and_value),
    )
    return (
        LayerOperator("attention enter", "qkv", takes=takes, gives=takes),
        _product("qkv", "qkv", down, takes=takes, gives=LATENT.latents),
        LayerOperator("heads", "attention", takes=LATENT.latents, gives=ATTENTION.heads, products=products),
        rotary,
    )


@lru_cache(maxsize=64)
def mlp_operators(shape: ModelShape) -> Operators:
    """The second half of a dense layer. In a parallel block it has the same input as the first half, and the sums of
    both leave together."""
    leave = LayerOperator("mlp leave", "down", takes=MLP.product_out, gives=BLOCK.mlp_out)
    if shape.parallel == "one-norm":
        # The up projection is fused with QKV in attention_operators; drop it here.
        _, *operators = _mlp("", shape.mlp_matrices, MLP, BLOCK.attention_norm_out.gathered)
        return (*operators, leave)
    stream = BLOCK.middle if shape.parallel == "none" else BLOCK.input
    takes = BLOCK.mlp_norm_out if shape.norms_before else stream
    norm = LayerOperator("mlp norm", "norm", takes=stream, gives=takes)
    return (
        *((norm,) if shape.norms_before else ()),
        LayerOperator("mlp enter", "up", takes=takes, gives=takes.gathered),
        *_mlp("", shape.mlp_matrices, MLP, takes.gathered),
        leave,
        *_mlp_out_norm(shape, BLOCK.mlp_out),
    )


def _mlp_out_norm(shape: ModelShape, takes: LayerTensor) -> Operators:
    """The norm of the output of the second half of a layer. No policy names it: its result is added, and a sum keeps
    nothing."""
    norm = LayerOperator("mlp out norm", "out norm", takes=takes, gives=BLOCK.mlp_out_norm_out)
    return (norm,) if shape.norms_after else ()


@lru_cache(maxsize=64)
def routed_operators(shape: ModelShape) -> Operators:
    """The second half of a layer with experts, without the shared ones. No policy names its norm, whose result several
    operators need. If weights multiply the input of experts, that product is always recomputed."""
    takes = BLOCK.mlp_norm_out if shape.norms_before else BLOCK.middle
    choice = WeightProduct(shape.gate_matrices[0], takes=takes, gives=ROUTING.logits)
    weighs = shape.mixture.weighs_input
    rows = ROUTING.weighed if weighs else ROUTING.dispatched
    norm = LayerOperator("norm before experts", "norm before experts", takes=BLOCK.middle, gives=takes)
    return (
        *((norm,) if shape.norms_before else ()),
        LayerOperator("router", "router", takes=takes, gives=ROUTING.weights, products=(choice,)),
        LayerOperator("experts enter", "dispatch", takes=takes, gives=takes),
        LayerOperator("dispatch", "dispatch", takes=takes, gives=ROUTING.dispatched),
        *((LayerOperator("weigh", "weigh", takes=ROUTING.dispatched, gives=rows),) if weighs else ()),
        *_mlp("expert ", shape.routed_matrices, EXPERT_MLP, rows),
        LayerOperator("combine", "combine", takes=EXPERT_MLP.product_out, gives=ROUTING.routed_out),
        LayerOperator("experts leave", "combine", takes=ROUTING.routed_out, gives=ROUTING.routed_out),
        *(() if shape.mixture.shared_ffn else _mlp_out_norm(shape, ROUTING.routed_out)),
    )


@lru_cache(maxsize=64)
def shared_operators(shape: ModelShape) -> Operators:
    """The shared experts, which all tokens meet, if there are any: one MLP with the router's input, and its gate."""
    mixture = shape.experts
    if mixture is None or not mixture.shared_ffn:
        return ()
    takes = BLOCK.mlp_norm_out if shape.norms_before else BLOCK.middle
    gate = tuple(
        LayerOperator("shared gate", "gate", takes=ROUTING.shared_out, gives=ROUTING.gated_out, products=(product,))
        for product in (
            WeightProduct(m, takes=takes, gives=ROUTING.shared_gate_logits) for m in shape.gate_matrices[1:]
        )
    )
    return (
        LayerOperator("shared enter", "up", takes=takes, gives=takes.gathered),
        *_mlp("shared ", shape.shared_matrices, SHARED_MLP, takes.gathered),
        LayerOperator("shared leave", "down", takes=SHARED_MLP.product_out, gives=ROUTING.shared_out),
        *gate,
        *_mlp_out_norm(shape, ROUTING.gated_out if gate else ROUTING.shared_out),
    )


def _mlp(prefix: str, matrices: tuple[Matrix, Matrix], mlp: MlpTensors, takes: LayerTensor) -> Operators:
    """Up (and gate), activation, down. `prefix` begins the operators' names."""
    return (
        _product(f"{prefix}up", "up", matrices[0], takes=takes, gives=mlp.up),
        LayerOperator(f"{prefix}activation", "activation", takes=mlp.up, gives=mlp.inner),
        _product(f"{prefix}down", "down", matrices[1], takes=mlp.inner, gives=mlp.product_out),
    )


def _product(
    name: str, unit: RecomputeUnit, matrix: Matrix, *, takes: LayerTensor, gives: LayerTensor
) -> LayerOperator:
    product = WeightProduct(matrix, takes=takes, gives=gives)
    return LayerOperator(name, unit, takes=takes, gives=gives, products=(product,))


@lru_cache(maxsize=64)
def piece_operators(shape: ModelShape, kind: str) -> Operators:
    """The operators of a piece of the model: a layer of a kind (config/model_shape.py), the "embedding", the "head", or
    "mtp", which is a module that predicts a further token, without its block."""
    match kind:
        case "embedding":
            look_up = LayerOperator("embedding", "embedding", takes=ENDS.tokens, gives=BLOCK.input)
            norm = LayerOperator("embedding norm", "embedding norm", takes=BLOCK.input, gives=BLOCK.input)
            return (look_up, norm) if shape.embedding_norm else (look_up,)
        case "head":
            return _head()
        case "mtp":
            return (
                LayerOperator("embedding", "embedding", takes=ENDS.tokens, gives=ENDS.embedded),
                LayerOperator("embedding norm", "before block", takes=ENDS.embedded, gives=ENDS.embedded),
                LayerOperator("hidden norm", "before block", takes=BLOCK.input, gives=BLOCK.input),
                _product("project", "before block", shape.further_matrix, takes=ENDS.joined, gives=BLOCK.input),
                *_head(),
            )
    half = routed_operators(shape) + shared_operators(shape) if has_experts(kind) else mlp_operators(shape)
    attention, end = (
        attention_operators(shape),
        LayerOperator("mlp join", "join", takes=half[-1].gives, gives=BLOCK.output),
    )
    if shape.parallel != "none":
        return (*attention, *half, end)
    middle = LayerOperator("attention join", "join", takes=attention[-1].gives, gives=BLOCK.middle)
    return (*attention, middle, *half, end)


def _head() -> Operators:
    """A norm, the product with the vocabulary and the loss."""
    gathered = ENDS.final_norm_out.gathered
    return (
        LayerOperator("final norm", "final norm", takes=ENDS.final_input, gives=ENDS.final_norm_out),
        LayerOperator("head enter", "head", takes=ENDS.final_norm_out, gives=gathered),
        LayerOperator("head", "head", takes=gathered, gives=ENDS.loss),
    )


def by_recompute_unit(operators: Iterable[LayerOperator]) -> Iterator[tuple[RecomputeUnit, Operators]]:
    """Groups of adjacent operators that are recomputed together, each with the name of its recompute unit."""
    for unit, operators_of_unit in groupby(operators, key=lambda operator: operator.recompute_unit):
        yield unit, tuple(operators_of_unit)
