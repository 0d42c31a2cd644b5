"""The sizes of a layer's tensors on one rank: a formula for each, over numbers or over arrays of them.

Tensors are those that operators take and give (layer_operators.py). Numbers of a plan may be arrays with one entry per
plan. Integers remain integers, so that an account of one plan is exact. Nothing here needs numpy.

Letters: T tokens within the layers, H hidden, N query and G key/value heads of a rank, D width of a head's query and
key, E of its value, F inner width of an MLP on a rank, R rows of tokens that go to experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.config.model_shape import ModelShape


@dataclass(frozen=True)
class TensorSizes:
    """Elements of tensors by name, for one microbatch. Fields and results of type Any are numbers or arrays.

    `tokens` are within the layers, `tokens_here` between them, where the sequence may be sharded over tp. A router
    chooses for `routed` tokens; `sent` rows leave this rank for experts, one row for each choice of a token, and
    `arrived` rows come to its own experts.
    """

    shape: ModelShape
    tp: Any
    expert_tp: Any
    tokens: Any
    tokens_here: Any
    routed: Any = 0
    sent: Any = 0
    arrived: Any = 0

    def __getitem__(self, tensor: str) -> Any:
        return _ELEMENTS[tensor](self)

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


def _heads_of(sizes: TensorSizes) -> Any:
    """Query, key and value: T (N + 2 G) D; or T N (2 D + E) for latent attention, all of whose heads have keys."""
    if sizes.shape.latent is None:
        return sizes.tokens * sizes.columns(0)
    return sizes.tokens * (sizes.shape.heads * (2 * sizes.shape.query_width + sizes.shape.value_width) // sizes.tp)


_STREAM = (
    "input", "attention normal", "attention output", "middle", "mlp normal", "mlp output", "output", "routed output",
    "shared output", "gated output", "final input", "final normal", "embedded", "normal attention output",
    "normal mlp output",
)  # fmt: skip
_WHOLE = (
    "input", "attention normal", "attention output", "middle", "mlp normal", "output", "shared output", "final normal",
)  # fmt: skip
_ELEMENTS: dict[str, Callable[[TensorSizes], Any]] = {
    **dict.fromkeys(_STREAM, lambda sizes: sizes.stream),
    **{f"whole {name}": lambda sizes: sizes.whole for name in _WHOLE},
    "joined": lambda sizes: 2 * sizes.stream,  # an embedding and hidden states side by side
    # Attention with grouped queries.
    "qkv": lambda sizes: sizes.tokens * sizes.columns(0),
    "query, key and value": _heads_of,
    "attended": lambda sizes: sizes.tokens * sizes.heads * sizes.shape.value_width,
    "log-sum-exp": lambda sizes: sizes.tokens * sizes.heads,
    # Latent attention: latents of queries, of keys and values, and the rotary part of keys, in one product.
    "latents": lambda sizes: sizes.latent_tokens * sizes.shape.attention_matrices[0].columns,
    "whole latents": lambda sizes: sizes.tokens * sizes.shape.attention_matrices[0].columns,
    "projected": lambda sizes: sizes.tokens * (sizes.columns(1) + sizes.shape.attention_matrices[0].columns),
    "query": lambda sizes: sizes.tokens * sizes.columns(1),
    "normal keys' latent": lambda sizes: sizes.tokens * sizes.shape.attention_matrices[2].inner,
    "made keys and values": lambda sizes: sizes.tokens * sizes.columns(2),
    # MLP.
    "up": lambda sizes: sizes.tokens * sizes.shape.mlp_matrices[0].columns_on(sizes.tp),
    "inner": lambda sizes: sizes.tokens * sizes.shape.mlp_matrices[1].inner_on(sizes.tp),
    # Experts.
    "logits": lambda sizes: sizes.routed * sizes.shape.gate_matrices[0].columns,
    "weights": lambda sizes: sizes.sent,
    "rows to send": lambda sizes: sizes.sent * sizes.shape.hidden,
    **dict.fromkeys(("dispatched", "weighed rows"), lambda sizes: sizes.arrived * sizes.shape.hidden),
    "expert up": lambda sizes: sizes.arrived * sizes.shape.routed_matrices[0].columns_on(sizes.expert_tp),
    "expert inner": lambda sizes: sizes.arrived * sizes.shape.routed_matrices[1].inner_on(sizes.expert_tp),
    "expert output": lambda sizes: sizes.arrived * sizes.shape.hidden,
    "shared up": lambda sizes: sizes.tokens * sizes.shape.shared_matrices[0].columns_on(sizes.tp),
    "shared inner": lambda sizes: sizes.tokens * sizes.shape.shared_matrices[1].inner_on(sizes.tp),
    "shared gate logits": lambda sizes: sizes.tokens_here,
}
