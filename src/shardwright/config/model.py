"""The model: one decoder-only transformer, such as Llama, GPT, Qwen or DeepSeek, depending on its fields."""

import math
from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.adapter import AdapterSpec
from shardwright.config.attention_sections import LatentSpec, TemperatureSpec, WindowSpec
from shardwright.config.base import SectionSpec
from shardwright.config.field_types import (
    Divisor,
    Layers,
    LayersOr0,
    Positive,
    PositiveOr0,
    Probability,
    Tokens,
    WidthOr0,
)
from shardwright.config.moe import MoeSpec
from shardwright.config.rotary_scaling import RotaryScalingSpec

MOST_MTP = 4  # most modules of multi-token prediction
Activation = Literal["silu", "gelu", "gelu-tanh", "relu", "relu2", "quick-gelu", "clamped-silu"]
NormPlace = Literal["before", "after", "around"]
ParallelBlock = Literal["none", "one-norm", "two-norms"]


class ModelSpec(SectionSpec):
    """Shape of a decoder. The defaults of `kind` fields are Llama's; see catalog/models for GPT's."""

    name: str = Field(
        "custom",
        description="Catalog name, the path of a TOML file like the catalog's, a Hugging Face config.json or a folder "
        "with one, or any name for your own shape.",
    )
    layers: Layers = Field(4, description="Number of transformer blocks.")
    hidden: Annotated[int, Field(gt=0, le=largest.WIDTH)] = Field(128, description="Width of the residual stream.")
    heads: Annotated[int, Field(gt=0, le=largest.HEADS)] = Field(8, description="Number of query heads.")
    kv_heads: Annotated[int, Field(ge=0, le=largest.HEADS)] = Field(
        0, description="Number of key/value heads (grouped-query attention); 0 means as many as heads."
    )
    head_dim: WidthOr0 = Field(0, description="Width of a head; 0 means hidden / heads.")
    ffn: WidthOr0 = Field(0, description="Width inside the MLP; 0 means 4 x hidden.")
    gated_mlp: bool = Field(True, description="Multiply act(gate) with up (SwiGLU) instead of act(up) alone.")
    activation: Activation = Field(
        "silu",
        description="Activation of the MLP. relu2: the square of relu; quick-gelu: x sigmoid(1.702 x); clamped-silu: "
        "(up + 1) x gate sigmoid(1.702 gate), with gate at most 7 and up within 7 (gpt-oss).",
    )
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="Kind of normalisation.")
    norm_epsilon: Divisor = Field(1e-5, description="Added to the variance.")
    norm_weight: bool = Field(True, description="Norms have weights, and LayerNorms biases (OLMo 1 has none).")
    norm_bias: bool = Field(True, description="LayerNorms that have weights have biases, too (Command R has none).")
    norm_place: NormPlace = Field(
        "before",
        description="Norms of what attention and MLP take (before), of what they give before it is added to the "
        "residual stream (after: OLMo 2), or of both (around: Gemma 2).",
    )
    parallel_block: ParallelBlock = Field(
        "none",
        description="Attention and MLP both take the input of the block, and what they give is added at once: through "
        "one norm (Falcon 7B), or a norm each (GPT-NeoX).",
    )
    positions: Literal["rotary", "learned", "alibi", "none"] = Field(
        "rotary",
        description="How a token knows its position; alibi takes a multiple of the distance from the scores of a head.",
    )
    position_offset: WidthOr0 = Field(
        0, description="Rows of the table of learned positions before that of the first token (OPT has 2)."
    )
    alibi_scaled: bool = Field(False, description="What alibi takes is scaled as scores are (Falcon).")
    rotary_base: Divisor = Field(10000.0, description="Base of the rotary frequencies.")
    rotary_dim: WidthOr0 = Field(
        0, description="Elements of a head that are turned by its position, its first ones; 0 means all."
    )
    rotary_scaling: RotaryScalingSpec = Field(RotaryScalingSpec(), description="Rotary positions for longer sequences.")
    no_rotary_every: LayersOr0 = Field(
        0, description="The last of every so many layers turns nothing; 0 means that all do."
    )
    qk_norm: Literal["none", "head", "full", "l2", "head-turned"] = Field(
        "none",
        description="Normalise queries and keys before they are turned by their positions, each head's by itself or "
        "those of all heads together; or after that, each head's by itself (head-turned), or in layers that are "
        "turned, without a weight (l2).",
    )
    qkv_bias: bool = Field(False, description="Biases of query, key and value alone; bias has these too.")
    attention_bias: bool = Field(False, description="Biases of attention's four matrices alone; bias has these too.")
    mlp_bias: bool = Field(False, description="Biases of the MLP alone (GPT-J); bias has these too.")
    window: WindowSpec = Field(WindowSpec(), description="Layers in which tokens see the last ones before them alone.")
    attention_scale: PositiveOr0 = Field(
        0.0, description="What scores are multiplied with; 0 means 1 / sqrt(width of a head's query)."
    )
    attention_softcap: PositiveOr0 = Field(
        0.0, description="Scores become softcap x tanh(score / softcap) before the softmax; 0 means that they stay."
    )
    sinks: bool = Field(False, description="A learned score for each head in the sum of its softmax, without a value.")
    clip_qkv: PositiveOr0 = Field(
        0.0,
        description="Queries, keys and values are at most this, and at least minus this, behind a norm of all heads "
        "and before one of each; 0 means any.",
    )
    temperature_tuning: TemperatureSpec = Field(
        TemperatureSpec(), description="Scores that grow with the position, in layers that turn nothing or in all."
    )
    latent: LatentSpec = Field(LatentSpec(), description="Multi-head latent attention, if its kv_rank is not 0.")
    dropout: Probability = Field(
        0.0,
        description="Probability of dropping an element of the embedding and of what each attention and MLP adds to "
        "the residual stream (in a parallel block of their sum), in training; attention probabilities are not dropped.",
    )
    bias: bool = Field(False, description="Biases in the linear layers of attention, MLP and experts.")
    head_bias: bool = Field(False, description="Logits have biases (Phi, GPT-J).")
    tied_embeddings: bool = Field(False, description="The output head uses the embedding table.")
    embedding_norm: bool = Field(False, description="Normalise embeddings before the first layer (BLOOM).")
    embedding_scale: Positive = Field(1.0, description="What embeddings of tokens are multiplied with (Gemma).")
    residual_scale: Positive = Field(
        1.0, description="What is added to the residual stream is multiplied with this (Granite)."
    )
    logit_scale: Positive = Field(1.0, description="What logits are multiplied with (Granite).")
    logit_softcap: PositiveOr0 = Field(
        0.0, description="Logits become cap x tanh(logit / cap), after their scale (Gemma 2); 0 means as they are."
    )
    vocab: Annotated[int, Field(gt=1, le=largest.VOCAB)] = Field(256, description="Number of token ids.")
    sequence: Tokens = Field(256, description="Tokens in one sample.")
    longest_sequence: Annotated[int, Field(ge=0, le=largest.SEQUENCE)] = Field(
        0, description="Longest sequence that the model is made for, in tokens; 0 means that nothing is said."
    )
    weights: str = Field(
        "",
        description="Folder of a Hugging Face model whose weights training begins with; empty means random ones. "
        "Without a name or other fields the model is the folder's too.",
    )
    init_std: Divisor = Field(
        0.02, description="Standard deviation of initial weights; residual outputs get it / sqrt(2 x layers)."
    )
    adapter: AdapterSpec = Field(AdapterSpec(), description="Adapters that are trained in place of the weights.")
    moe: MoeSpec = Field(MoeSpec(), description="Experts in place of the MLP.")
    mtp_layers: Annotated[int, Field(ge=0, le=MOST_MTP)] = Field(
        0,
        description="Modules of multi-token prediction behind the last layer, for training: each has a layer like the "
        "last one and predicts one token further. 0 means none.",
    )
    mtp_weight: Annotated[float, Field(ge=0, le=1)] = Field(
        0.3, description="Weight of the mean of the losses of multi-token prediction, beside the main loss."
    )
    told_parameters_b: Annotated[float, Field(ge=0, le=largest.PARAMETERS / 1e9)] = Field(
        0.0,
        description="Parameters that the model is said to have, in 1e9, without those of further tokens; predictions "
        "note where the other fields do not make so many. 0 means that nothing is said.",
    )

    @property
    def longest(self) -> int:
        """Longest sequence that the model is made for, or the length of its samples if unknown, in tokens."""
        return self.longest_sequence or self.sequence

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head with the default filled in."""
        return self.head_dim or self.hidden // self.heads

    @property
    def is_latent(self) -> bool:
        """True if attention is multi-head latent attention."""
        return self.latent.kv_rank > 0

    @property
    def query_width(self) -> int:
        """Width of a head's query, equal to that of its key."""
        return self.latent.nope_dim + self.latent.rope_dim if self.is_latent else self.head_size

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.latent.value_dim if self.is_latent else self.head_size

    @property
    def rotary_width(self) -> int:
        """Number of elements of a head that rotary positions turn."""
        return self.latent.rope_dim if self.is_latent else self.rotary_dim or self.head_size

    @property
    def softmax_scale(self) -> float:
        """The factor by which products of queries and keys are multiplied before the softmax."""
        return self.rotary_scaling.temperature * (self.attention_scale or 1 / math.sqrt(self.query_width))

    def is_turned(self, block: int) -> bool:
        """True if a block turns queries and keys by their positions. Blocks of multi-token prediction are like the last
        layer."""
        every, layer = self.no_rotary_every, min(block, self.layers - 1)
        return self.positions == "rotary" and not (every and (layer + 1) % every == 0)

    def is_windowed(self, block: int) -> bool:
        """True if a block attends within a window."""
        return self.window.is_in(min(block, self.layers - 1))

    @property
    def norms_heads(self) -> bool:
        """True if each head's query and key have a norm with a weight."""
        return self.qk_norm in ("head", "head-turned")

    def grows(self, block: int) -> bool:
        """True if the queries of a block grow with their position."""
        tuning = self.temperature_tuning
        return tuning.scale > 0 and (tuning.in_all_layers or not self.is_turned(block))

    @property
    def has_attention_bias(self) -> bool:
        """True if attention's four matrices have biases."""
        return self.bias or self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        """True if the MLP has biases."""
        return self.bias or self.mlp_bias

    @property
    def changes_logits(self) -> bool:
        """True if logits are scaled or capped."""
        return self.logit_scale != 1.0 or self.logit_softcap > 0

    @property
    def shares_table(self) -> bool:
        """True if the last stage also uses the embedding table: for the head, or to look up further tokens."""
        return self.tied_embeddings or self.mtp_layers > 0

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks: the layers, and after them the blocks of multi-token prediction."""
        return self.layers + self.mtp_layers

    @property
    def blocks_with_experts(self) -> list[int]:
        """The numbers of the blocks that have experts."""
        return [number for number in range(self.num_blocks) if self.has_experts(number)]

    @property
    def has_router_losses(self) -> bool:
        """True if routers add losses."""
        return bool(self.blocks_with_experts) and (self.moe.aux_loss != "none" or self.moe.z_coefficient > 0)

    def has_experts(self, block: int) -> bool:
        """True if a block has experts. Blocks of multi-token prediction are like the last layer."""
        return self.moe.has_experts(min(block, self.layers - 1))

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP with the default filled in."""
        return self.ffn or 4 * self.hidden

    @property
    def is_adapted(self) -> bool:
        """True if adapters are trained, and the model's own weights are frozen."""
        return self.adapter.rank > 0
