"""How large the tensors of a layer are on one rank: a formula for each, over numbers or over arrays of them.

Tensors are those that operators take and give (layer_operators.py). Numbers of a plan may be arrays with one entry a
plan, and whole numbers remain whole, so that an account of one plan is exact. Nothing here needs numpy.

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
    """Elements of tensors by name, for one microbatch. Fields and results that are Any are numbers or arrays.

    `tokens` are within the layers, `tokens_here` between them, where the sequence may be sharded over tp. A router
    chooses for `routed` tokens; `sent` rows leave this rank for experts, a token's for each of its choices, and
    `arrived` rows come to its own.
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
        """The residual stream within the layers, T H, whole along what tp shares of the sequence."""
        return self.tokens * self.shape.hidden

    @cached_property
    def heads(self) -> Any:
        """N; one where there are more ranks than heads."""
        heads = self.shape.heads // self.tp
        return heads + (heads == 0)  # of numbers and of arrays

    @cached_property
    def latent_tokens(self) -> Any:
        """Tokens whose latents a rank makes: its own; all, if it makes queries of them without low ranks."""
        latent = self.shape.latent
        return self.tokens_here if latent and latent.query_rank else self.tokens

    def columns(self, matrix: int) -> Any:
        """Width on a rank of what the product with one of attention's matrices gives."""
        return self.shape.attention_matrices[matrix].columns_on(self.tp)


def _heads_of(of: TensorSizes) -> Any:
    """Query, key and value: T (N + 2 G) D, or of latent attention, whose heads all have keys, T N (2 D + E)."""
    if of.shape.latent is None:
        return of.tokens * of.columns(0)
    return of.tokens * (of.shape.heads * (2 * of.shape.query_width + of.shape.value_width) // of.tp)


_STREAM = (
    "input", "attention normal", "attention output", "middle", "mlp normal", "mlp output", "output", "routed output",
    "shared output", "gated output", "final input", "final normal", "embedded", "normal attention output",
    "normal mlp output",
)  # fmt: skip
_WHOLE = (
    "input", "attention normal", "attention output", "middle", "mlp normal", "output", "shared output", "final normal",
)  # fmt: skip
_ELEMENTS: dict[str, Callable[[TensorSizes], Any]] = {
    **dict.fromkeys(_STREAM, lambda of: of.stream),
    **{f"whole {name}": lambda of: of.whole for name in _WHOLE},
    "joined": lambda of: 2 * of.stream,  # an embedding and hidden states side by side
    # Attention with grouped queries.
    "qkv": lambda of: of.tokens * of.columns(0),
    "query, key and value": _heads_of,
    "attended": lambda of: of.tokens * of.heads * of.shape.value_width,
    "log-sum-exp": lambda of: of.tokens * of.heads,
    # Latent attention: latents of queries, of keys and values, and the rotary part of keys, in one product.
    "latents": lambda of: of.latent_tokens * of.shape.attention_matrices[0].columns,
    "whole latents": lambda of: of.tokens * of.shape.attention_matrices[0].columns,
    "projected": lambda of: of.tokens * (of.columns(1) + of.shape.attention_matrices[0].columns),
    "query": lambda of: of.tokens * of.columns(1),
    "normal keys' latent": lambda of: of.tokens * of.shape.attention_matrices[2].inner,
    "made keys and values": lambda of: of.tokens * of.columns(2),
    # MLP.
    "up": lambda of: of.tokens * of.shape.mlp_matrices[0].columns_on(of.tp),
    "inner": lambda of: of.tokens * of.shape.mlp_matrices[1].inner_on(of.tp),
    # Experts.
    "logits": lambda of: of.routed * of.shape.gate_matrices[0].columns,
    "weights": lambda of: of.sent,
    "rows to send": lambda of: of.sent * of.shape.hidden,
    **dict.fromkeys(("dispatched", "weighed rows"), lambda of: of.arrived * of.shape.hidden),
    "expert up": lambda of: of.arrived * of.shape.routed_matrices[0].columns_on(of.expert_tp),
    "expert inner": lambda of: of.arrived * of.shape.routed_matrices[1].inner_on(of.expert_tp),
    "expert output": lambda of: of.arrived * of.shape.hidden,
    "shared up": lambda of: of.tokens * of.shape.shared_matrices[0].columns_on(of.tp),
    "shared inner": lambda of: of.tokens * of.shape.shared_matrices[1].inner_on(of.tp),
    "shared gate logits": lambda of: of.tokens_here,
}
