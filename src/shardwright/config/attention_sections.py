"""Sections of the model about attention: latents, windows, and scores that grow with the position."""

from typing import Annotated

from pydantic import Field

from shardwright.config.base import Spec
from shardwright.config.field_types import LayersOr0, PositiveOr0, Tokens, TokensOr0, WidthOr0
from shardwright.config.phrase import say

# Fields of ordinary attention that latent attention does not have, and what it replaces of them.
REPLACED_BY_LATENTS = {
    "head_dim": say("the width of heads by those of their parts"),
    "kv_heads": say("groups of heads by a latent that all share"),
    "bias": say("the matrices that have biases"),
    "qkv_bias": say("the matrix that has them"),
    "attention_bias": say("the matrices that have them"),
    "qk_norm": say("the norm of each head by those of the latents"),
    "rotary_dim": say("what is turned of a head by a part of it"),
    "no_rotary_every": say("heads by some with a part that is turned"),
    "window": say("attention by one to all tokens"),
    "attention_softcap": say("attention by one without a cap"),
    "sinks": say("attention by one without them"),
    "clip_qkv": say("what is clipped"),
    "temperature_tuning": say("queries that grow with their position by ones that do not"),
}


class LatentSpec(Spec):
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434, section 2.1). Keys and values are made from one small
    vector per token, and queries from another. Widths are of one head.

    A head's query and key are two parts side by side: `nope_dim` elements without position and `rope_dim` elements with
    rotary position. All heads share the rotary part of the key.
    """

    kv_rank: WidthOr0 = Field(
        0, description="Width of the vector that keys and values are made from; 0 means ordinary attention."
    )
    q_rank: WidthOr0 = Field(0, description="Width of the vector that queries are made from; 0 means from the input.")
    nope_dim: WidthOr0 = Field(128, description="Width of a head's query and key without position.")
    rope_dim: WidthOr0 = Field(64, description="Width of a head's query and key with rotary position.")
    value_dim: WidthOr0 = Field(128, description="Width of a head's value.")
    norm_epsilon: PositiveOr0 = Field(
        0.0, description="Added to the variance of both vectors in their norms; 0 means model.norm_epsilon."
    )

    def faults(self) -> list[str]:
        """Contradictions among the fields of the section."""
        if self == LatentSpec():
            return []
        if self.kv_rank == 0:
            return [
                say("model.latent is set, and its kv_rank 0 means ordinary attention; set kv_rank, or leave it out")
            ]
        faults: list[str] = [
            say(
                "model.latent.{name} is 0, and a head needs some; leave it out for the default, {default}",
                name=name,
                default=default,
            )
            for name, default in (("rope_dim", 64), ("value_dim", 128))
            if getattr(self, name) == 0
        ]
        if self.rope_dim % 2:
            faults.append(
                say(
                    "rotary positions turn pairs of elements, and model.latent.rope_dim is {rope_dim}; use an even one",
                    rope_dim=self.rope_dim,
                )
            )
        if self.value_dim > self.nope_dim + self.rope_dim:
            faults.append(
                say(
                    "model.latent.value_dim {value_dim} is more than the width of a key, nope_dim {nope_dim} + "
                    "rope_dim {rope_dim} = {width}; use at most that",
                    value_dim=self.value_dim,
                    nope_dim=self.nope_dim,
                    rope_dim=self.rope_dim,
                    width=self.nope_dim + self.rope_dim,
                )
            )
        return faults


class WindowSpec(Spec):
    """The window of some layers: its length, the layers that have it, and their rotary positions. A token sees only the
    last tokens before it, or the tokens of its chunk.

    Beltagy et al. 2020 (arXiv 2004.05150, section 3.1); layers with and without a window in turn: Gemma 2 (arXiv
    2408.00118, section 2), Gemma 3, gpt-oss, OLMo 3. Chunks: Llama 4.
    """

    size: TokensOr0 = Field(
        0, description="Tokens that one attends to in layers with a window, itself among them; 0 means no windows."
    )
    full_every: LayersOr0 = Field(
        0, description="The last of every so many layers attends to all tokens before; 0 means that none does."
    )
    full_first: bool = Field(
        False, description="The first of every full_every layers attends to all tokens before, in place of the last."
    )
    first_full: LayersOr0 = Field(0, description="So many first layers attend to all tokens before.")
    chunked: bool = Field(
        False, description="Sequences are cut into chunks of this size, and tokens attend within their own."
    )
    rotary_base: PositiveOr0 = Field(
        0.0, description="Base of the rotary frequencies in layers with a window; 0 means the model's."
    )
    rotary_scaled: bool = Field(True, description="model.rotary_scaling is for layers with a window too.")

    def is_in(self, layer: int) -> bool:
        """True if a layer has a window."""
        place = layer if self.full_first else layer + 1
        is_full = layer < self.first_full or (self.full_every > 0 and place % self.full_every == 0)
        return self.size > 0 and not is_full

    def keys_seen(self, sequence: int) -> float:
        """Twice the mean number of keys that a query sees in a layer with a window. It replaces the length of the
        sequence, which is twice the mean if a query sees all keys before it."""
        size = min(self.size, sequence)
        if not size:
            return 0.0
        if self.chunked:
            chunks, remainder = divmod(sequence, size)
            return (chunks * size**2 + remainder**2) / sequence
        return size * (2 - size / sequence)

    def faults(self, layers: int) -> list[str]:
        """Contradictions among the fields of the section, in a model of `layers` layers."""
        if not self.size and self != WindowSpec():
            return [say("model.window is set, and its size 0 means no windows; set size, or leave it out")]
        if self.full_first and not self.full_every:
            return [
                say(
                    "model.window.full_first says which of full_every layers attends to all, and full_every is 0; set "
                    "it, or leave full_first out"
                )
            ]
        if self.size and not any(map(self.is_in, range(layers))):
            return [
                say(
                    "model.window leaves none of {layers} layers a window (first_full {first_full}, full_every "
                    "{full_every}); lower first_full, use another full_every, or leave it out",
                    layers=layers,
                    first_full=self.first_full,
                    full_every=self.full_every,
                )
            ]
        return []


class TemperatureSpec(Spec):
    """Scores that grow with the position of a query: Llama 4 in layers without rotary positions, Ministral 3 in all,
    after Nakanishi 2025 (arXiv 2501.19399). A query at position p, where the first one is `first_position`, is
    multiplied by 1 + scale x ln(1 + floor(p / floor))."""

    scale: PositiveOr0 = Field(0.0, description="How much queries grow with their position; 0 means not at all.")
    floor: Tokens = Field(8192, description="Positions after which they grow once more.")
    in_all_layers: bool = Field(False, description="They grow in layers with rotary positions too (Ministral 3).")
    first_position: Annotated[int, Field(ge=0, le=1)] = Field(
        1, description="Number of the first position: 1 in Llama 4, 0 in Ministral 3."
    )
