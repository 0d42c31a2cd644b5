"""The tensors of a layer: each has the label that people see, and a formula of its size on one rank.

Operators take and give these tensors (layer_operators.py); tensors inside an operator that our runtime keeps are in
memory/kept_tensors.py. Numbers of a plan may be arrays with one entry per plan. Integers remain integers, so that an
account of one plan is exact. Nothing here needs numpy.

Letters: T tokens within the layers, H hidden, N query and G key/value heads of a rank, D width of a head's query and
key, E of its value, F inner width of an MLP on a rank, R rows of tokens that go to experts.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

from shardwright.config.model_shape import ModelShape

HALF, FLOAT32 = 2, 4  # bytes of a number


@dataclass(frozen=True)
class TensorSizes:
    """Elements of tensors, for one microbatch on one rank. Fields and results of type Any are numbers or arrays.

    `tokens` are within the layers, `tokens_here` between them, where the sequence may be sharded over tp. A router
    chooses for `routed` tokens; `sent` rows leave this rank for experts, one row for each choice of a token, and
    `arrived` rows come to its own experts.
    """

    shape: ModelShape
    _: KW_ONLY
    tp: Any
    expert_tp: Any
    tokens: Any
    tokens_here: Any
    routed: Any = 0
    sent: Any = 0
    arrived: Any = 0

    def __getitem__(self, tensor: "LayerTensor") -> Any:
        return tensor.elements(self)

    @cached_property
    def stream(self) -> Any:
        """The residual stream between the layers, T H or a share of it."""
        return self.tokens_here * self.shape.hidden

    @cached_property
    def whole(self) -> Any:
        """The residual stream within the layers, T H, whole even if tp ranks share the sequence."""
        return self.tokens * self.shape.hidden

    @cached_property
    def heads(self) -> Any:
        """N; one if there are more ranks than heads."""
        heads = self.shape.heads // self.tp
        return heads + (heads == 0)  # works for numbers and arrays

    @cached_property
    def latent_tokens(self) -> Any:
        """Tokens whose latents a rank computes: its own; all, if it computes queries without low ranks."""
        latent = self.shape.latent
        return self.tokens_here if latent and latent.query_rank else self.tokens

    def columns(self, matrix: int) -> Any:
        """Width on a rank of the result of the product with one of attention's matrices."""
        return self.shape.attention_matrices[matrix].columns_on(self.tp)


# Kinds of tensors.


@dataclass(frozen=True, eq=False)
class LabelledTensor:
    """A tensor of a layer, which is itself the key of its size. `label` is its name in tables and in JSON."""

    label: str


@dataclass(frozen=True, eq=False)
class LayerTensor(LabelledTensor):
    """A tensor that operators take and give. `elements` computes the number of its elements on one rank.

    `element_bytes` are those of its number type; 0 means the number type of the model.
    """

    elements: Callable[[TensorSizes], Any]
    element_bytes: int = 0

    @cached_property
    def in_float8(self) -> LabelledTensor:
        """The tensor cast to fp8, as the operand of a product."""
        return LabelledTensor(f"{self.label} in fp8")


@dataclass(frozen=True, eq=False)
class GatheredTensor(LayerTensor):
    """The input of a column-parallel product with all tokens, which tp ranks gather from their `shards`."""

    shards: LayerTensor = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class ShardedTensor(LayerTensor):
    """A tensor between products, of which each tp rank may have a shard of the tokens; the residual stream or a tensor
    of its size, if not given otherwise. `all_elements` computes the number of elements of all tokens."""

    elements: Callable[[TensorSizes], Any] = lambda sizes: sizes.stream
    all_elements: Callable[[TensorSizes], Any] = lambda sizes: sizes.whole

    @cached_property
    def gathered(self) -> GatheredTensor:
        """The tensor at a product, with all tokens on each tp rank."""
        return GatheredTensor(f"{self.label}, at the product", self.all_elements, shards=self)


@dataclass(frozen=True, eq=False)
class PartialSum(LayerTensor):
    """The result of a row-parallel product before tp ranks sum it: for all tokens, if not given otherwise."""

    elements: Callable[[TensorSizes], Any] = lambda sizes: sizes.whole


# The tensors.


@dataclass(frozen=True)
class BlockTensors:
    """The residual stream, and the tensors between it and the operators of each half of a layer.

    In a layer with experts `mlp_out` is the sum of the routed and the shared experts' results.
    """

    input: ShardedTensor = ShardedTensor("input")
    attention_norm_out: ShardedTensor = ShardedTensor("attention normal")
    attention_out: ShardedTensor = ShardedTensor("attention output")
    attention_out_norm_out: ShardedTensor = ShardedTensor("normal attention output")
    middle: ShardedTensor = ShardedTensor("middle")
    mlp_norm_out: ShardedTensor = ShardedTensor("mlp normal")
    mlp_out: ShardedTensor = ShardedTensor("mlp output")
    mlp_out_norm_out: ShardedTensor = ShardedTensor("normal mlp output")
    output: ShardedTensor = ShardedTensor("output")


def _heads_elements(sizes: TensorSizes) -> Any:
    """Query, key and value: T (N + 2 G) D; or T N (2 D + E) for latent attention, all of whose heads have keys."""
    if sizes.shape.latent is None:
        return sizes.tokens * sizes.columns(0)
    return sizes.tokens * (sizes.shape.heads * (2 * sizes.shape.query_width + sizes.shape.value_width) // sizes.tp)


def _attended_elements(sizes: TensorSizes) -> Any:
    """The results of a rank's heads, T N E."""
    return sizes.tokens * sizes.heads * sizes.shape.value_width


@dataclass(frozen=True)
class AttentionTensors:
    """Attention, between its first product and the sum of its last one. `heads` are query, key and value in the order
    of the attention core; `traded_query` has a part of the heads for all tokens (Ulysses)."""

    qkv: LayerTensor = LayerTensor("qkv", lambda sizes: sizes.tokens * sizes.columns(0))
    heads: LayerTensor = LayerTensor("query, key and value", _heads_elements)
    traded_query: LayerTensor = LayerTensor("traded query", _attended_elements)
    attended: LayerTensor = LayerTensor("attended", _attended_elements)
    log_sum_exp: LayerTensor = LayerTensor("log-sum-exp", lambda sizes: sizes.tokens * sizes.heads, FLOAT32)
    product_out: PartialSum = PartialSum("output product")


@dataclass(frozen=True)
class LatentTensors:
    """Latent attention before its core. `latents` are those of queries, of keys and values, and the rotary part of
    keys, in one product; `projected` are queries and latents, if queries have no low rank."""

    latents: ShardedTensor = ShardedTensor(
        "latents",
        lambda sizes: sizes.latent_tokens * sizes.shape.attention_matrices[0].columns,
        all_elements=lambda sizes: sizes.tokens * sizes.shape.attention_matrices[0].columns,
    )
    projected: LayerTensor = LayerTensor(
        "projected", lambda sizes: sizes.tokens * (sizes.columns(1) + sizes.shape.attention_matrices[0].columns)
    )
    query: LayerTensor = LayerTensor("query", lambda sizes: sizes.tokens * sizes.columns(1))
    key_latent_norm_out: LayerTensor = LayerTensor(
        "normal keys' latent", lambda sizes: sizes.tokens * sizes.shape.attention_matrices[2].inner
    )
    key_and_value: LayerTensor = LayerTensor("key and value", lambda sizes: sizes.tokens * sizes.columns(2))


@dataclass(frozen=True)
class MlpTensors:
    """One MLP: the results of its first product, of its activation and of its last product."""

    up: LayerTensor
    inner: LayerTensor
    product_out: PartialSum


@dataclass(frozen=True)
class RoutingTensors:
    """Tokens on their way to experts and back, and the results that are added up in a layer with experts."""

    logits: ShardedTensor = ShardedTensor(
        "router logits",
        lambda sizes: sizes.routed * sizes.shape.gate_matrices[0].columns,
        FLOAT32,
        all_elements=lambda sizes: sizes.tokens * sizes.shape.gate_matrices[0].columns,
    )
    weights: LayerTensor = LayerTensor("weights", lambda sizes: sizes.sent)
    rows_to_send: LayerTensor = LayerTensor("rows to send", lambda sizes: sizes.sent * sizes.shape.hidden)
    dispatched: LayerTensor = LayerTensor("dispatched rows", lambda sizes: sizes.arrived * sizes.shape.hidden)
    weighed: LayerTensor = LayerTensor("weighed rows", lambda sizes: sizes.arrived * sizes.shape.hidden)
    returned: LayerTensor = LayerTensor("returned rows", lambda sizes: sizes.sent * sizes.shape.hidden)
    weighted_sum: PartialSum = PartialSum("weighted sum")
    routed_out: ShardedTensor = ShardedTensor("routed output")
    shared_out: ShardedTensor = ShardedTensor("shared output")
    shared_gate_logits: LayerTensor = LayerTensor("shared gate logits", lambda sizes: sizes.tokens_here, FLOAT32)
    gated_out: ShardedTensor = ShardedTensor("gated output")


@dataclass(frozen=True)
class EndTensors:
    """The tensors before and after the layers, and before the block of a further token, whose input is a product of
    `joined`: an embedding and hidden states side by side."""

    tokens: LayerTensor = LayerTensor("tokens", lambda sizes: sizes.tokens)
    looked_up: PartialSum = PartialSum("looked-up rows")
    embedded: ShardedTensor = ShardedTensor("embedded")
    joined: ShardedTensor = ShardedTensor(
        "joined", lambda sizes: 2 * sizes.stream, all_elements=lambda sizes: 2 * sizes.whole
    )
    final_input: ShardedTensor = ShardedTensor("final input")
    final_norm_out: ShardedTensor = ShardedTensor("final normal")
    logits: LayerTensor = LayerTensor("logits", lambda sizes: sizes.tokens * sizes.shape.vocab // sizes.tp)
    loss: LayerTensor = LayerTensor("loss of a token", lambda sizes: sizes.tokens)


BLOCK = BlockTensors()
ATTENTION = AttentionTensors()
LATENT = LatentTensors()
ROUTING = RoutingTensors()
ENDS = EndTensors()
MLP = MlpTensors(
    up=LayerTensor("up", lambda sizes: sizes.tokens * sizes.shape.mlp_matrices[0].columns_on(sizes.tp)),
    inner=LayerTensor("inner", lambda sizes: sizes.tokens * sizes.shape.mlp_matrices[1].inner_on(sizes.tp)),
    product_out=PartialSum("down product"),
)
SHARED_MLP = MlpTensors(
    up=LayerTensor("shared up", lambda sizes: sizes.tokens * sizes.shape.shared_matrices[0].columns_on(sizes.tp)),
    inner=LayerTensor("shared inner", lambda sizes: sizes.tokens * sizes.shape.shared_matrices[1].inner_on(sizes.tp)),
    product_out=PartialSum("shared down product"),
)
EXPERT_MLP = MlpTensors(
    up=LayerTensor(
        "expert up", lambda sizes: sizes.arrived * sizes.shape.routed_matrices[0].columns_on(sizes.expert_tp)
    ),
    inner=LayerTensor(
        "expert inner", lambda sizes: sizes.arrived * sizes.shape.routed_matrices[1].inner_on(sizes.expert_tp)
    ),
    product_out=PartialSum("expert output", lambda sizes: sizes.arrived * sizes.shape.hidden),
)
