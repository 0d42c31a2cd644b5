"""Families of transformers by their blocks: norms, the residual stream, MLPs and experts. What their attention has of
its own is left out: windows, sinks, partial rotations, norms of queries and keys together.

`reference` makes a tiny model of a family with random values in every parameter, `our_layout` names and fuses its
tensors as we do: it only moves elements, so weights and gradients take the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec

Take = Callable[[str], Tensor]
# No two sizes are the same, so that hardly a matrix fits in the wrong place or the wrong way round.
SHAPE = {"layers": 2, "hidden": 48, "heads": 6, "ffn": 80, "vocab": 61, "sequence": 13}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Family:
    """The fields of our model, how transformers makes theirs, and how their tensors are named.

    `norms` are those of a block by our names, `adds_one`: norm weights are less by one with them. Pairs of a head are
    neighbours where it is `interleaved`. Weights whose name has one of `larger` are so many times larger. `mlp` is what
    they call it, or experts in its place.
    """

    fields: dict[str, Any]
    make: Callable[[ModelSpec], Any]
    layout: Callable[["Family", Take, ModelSpec], dict[str, Tensor]]
    norms: dict[str, str] = field(default_factory=lambda: NORMS)
    adds_one: bool = False
    interleaved: bool = False
    larger: dict[str, float] = field(default_factory=dict)
    mlp: str = "mlp"

    @property
    def spec(self) -> ModelSpec:
        """Our model."""
        return ModelSpec(**SHAPE | self.fields)


def reference(family: Family) -> Any:
    """The model of transformers, with plain attention and experts."""
    spec = family.spec
    model = family.make(spec)
    model.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            mean, std = (1.0 - family.adds_one, 0.3) if is_norm_weight else (0.0, 0.2)
            std *= next((factor for part, factor in family.larger.items() if part in name), 1.0)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))
            if name.endswith("sinks"):
                parameter.fill_(-1e9)  # a share of the softmax that is none
    return model.eval()


def our_layout(family: Family, theirs: Mapping[str, Tensor], are_weights: bool) -> dict[str, Tensor]:
    """Tensors by their names as full tensors by ours. Fails if one of theirs has no place with us."""
    rest = {name: tensor for name, tensor in theirs.items() if not name.endswith("sinks")}
    ours = family.layout(family, rest.pop, family.spec)
    assert not rest, f"not taken over: {sorted(rest)}"
    if are_weights and family.adds_one:
        ours = {name: 1 + tensor if name.endswith("norm.weight") else tensor for name, tensor in ours.items()}
    return ours


# Names and forms of tensors.


def _like_llama(family: Family, take: Take, spec: ModelSpec) -> dict[str, Tensor]:
    ours = _ends(take, spec, "model.embed_tokens", "model.norm")
    for layer in range(spec.layers):
        mine, theirs = f"layers.{layer}", f"model.layers.{layer}"
        ours |= _norms(family, take, spec, mine, theirs)
        for part, fused in _parts(spec):
            ours[f"{mine}.attention.qkv{fused}"] = _qkv(family, take, spec, f"{theirs}.self_attn", part)
            ours[f"{mine}.attention.out.{part}"] = take(f"{theirs}.self_attn.o_proj.{part}")
        for which in "qk" if spec.qk_norm else "":
            ours[f"{mine}.attention.{which}_norm.weight"] = take(f"{theirs}.self_attn.{which}_norm.weight")
        if spec.has_experts(layer):
            ours |= _experts(take, spec, f"{mine}.moe", f"{theirs}.{family.mlp}")
        else:
            ours |= _gated(take, f"{mine}.mlp", f"{theirs}.{family.mlp}")
    return ours


def _ends(take: Take, spec: ModelSpec, table: str, norm: str, head: str = "lm_head") -> dict[str, Tensor]:
    ours = {"embedding.weight": take(f"{table}.weight")}
    if spec.norm_weight:
        ours["norm.weight"] = take(f"{norm}.weight")
        ours |= {"norm.bias": take(f"{norm}.bias")} if spec.norm == "layernorm" else {}
    return ours if spec.tied_embeddings else ours | {"head.weight": take(f"{head}.weight")}


def _norms(family: Family, take: Take, spec: ModelSpec, mine: str, theirs: str) -> dict[str, Tensor]:
    parts = ("weight", "bias") if spec.norm == "layernorm" else ("weight",)
    names = ((our, name, part) for our, name in family.norms.items() for part in parts)
    return {f"{mine}.{our}.{part}": take(f"{theirs}.{name}.{part}") for our, name, part in names}


def _parts(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    return (("weight", ".weight"), ("bias", "_bias")) if spec.bias else (("weight", ".weight"),)


def _qkv(family: Family, take: Take, spec: ModelSpec, theirs: str, part: str) -> Tensor:
    """Query, key and value of each key/value head side by side; halves of a head in place of neighbours."""
    q, k, v = (take(f"{theirs}.{which}_proj.{part}") for which in "qkv")
    groups = [x.reshape(spec.num_kv_heads, -1, spec.head_size, *x.shape[1:]) for x in (q, k, v)]
    if family.interleaved:
        order = torch.arange(spec.head_size).view(-1, 2).t().flatten()
        groups[:2] = [x[:, :, order] for x in groups[:2]]
    return torch.cat(groups, dim=1)


def _gated(take: Take, mine: str, theirs: str) -> dict[str, Tensor]:
    try:
        up = torch.stack([take(f"{theirs}.{which}_proj.weight") for which in ("gate", "up")])
    except KeyError:  # both in one
        up = take(f"{theirs}.gate_up_proj.weight").unflatten(0, (2, -1))
    return {f"{mine}.up.weight": up, f"{mine}.down.weight": take(f"{theirs}.down_proj.weight")}


def _experts(take: Take, spec: ModelSpec, mine: str, theirs: str) -> dict[str, Tensor]:
    """Theirs are [experts, H, 2 ffn]: gate before up, or in turn where there are biases (gpt-oss)."""
    in_turn, experts = spec.bias, f"{theirs}.experts"

    def two(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).transpose(1, 2) if in_turn else x.unflatten(1, (2, -1))

    ours = {
        f"{mine}.router.weight": take(f"{theirs}.router.weight"),
        f"{mine}.experts.up": two(take(f"{experts}.gate_up_proj").transpose(1, 2)),
        f"{mine}.experts.down": take(f"{experts}.down_proj").transpose(1, 2),
    }
    if spec.moe.router_bias:
        ours[f"{mine}.router.bias"] = take(f"{theirs}.router.bias")
    if spec.bias:
        ours[f"{mine}.experts.up_bias"] = two(take(f"{experts}.gate_up_proj_bias"))
        ours[f"{mine}.experts.down_bias"] = take(f"{experts}.down_proj_bias")
    if spec.moe.shared_experts:
        ours |= _gated(take, f"{mine}.shared", f"{theirs}.shared_expert")
    return ours


def _plain(
    table: str, layers: str, norm: str, head: str, modules: dict[str, str], qkv: bool = True
) -> Callable[[Family, Take, ModelSpec], dict[str, Tensor]]:
    """The layout of models without gates. Their query, key and value lie by head as ours, if they are one matrix."""

    def layout(family: Family, take: Take, spec: ModelSpec) -> dict[str, Tensor]:
        ours = _ends(take, spec, table, norm, head)
        for layer in range(spec.layers):
            mine, theirs = f"layers.{layer}", f"{layers}.{layer}"
            ours |= _norms(family, take, spec, mine, theirs)
            for part, fused in _parts(spec):
                both = (spec.num_kv_heads, -1, spec.head_size)
                if qkv:
                    made = take(f"{theirs}.{modules['qkv']}.{part}").unflatten(0, both)
                else:
                    made = _qkv(family, take, spec, f"{theirs}.self_attn", part)
                ours[f"{mine}.attention.qkv{fused}"] = made
                ours[f"{mine}.attention.out.{part}"] = take(f"{theirs}.{modules['out']}.{part}")
                ours[f"{mine}.mlp.up{fused}"] = take(f"{theirs}.{modules['up']}.{part}")[None]
                ours[f"{mine}.mlp.down.{part}"] = take(f"{theirs}.{modules['down']}.{part}")
        return ours

    return layout


def _from_opt(family: Family, take: Take, spec: ModelSpec) -> dict[str, Tensor]:
    base = "model.decoder"
    modules = {"out": "self_attn.out_proj", "up": "fc1", "down": "fc2"}
    layout = _plain(f"{base}.embed_tokens", f"{base}.layers", f"{base}.final_layer_norm", "lm_head", modules, qkv=False)
    return {"positions.weight": take(f"{base}.embed_positions.weight")} | layout(family, take, spec)


# How transformers makes them.


def _common(spec: ModelSpec, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab, "hidden_size": spec.hidden, "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads, "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.sequence, "rms_norm_eps": spec.norm_epsilon, "use_cache": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rotary_base, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": spec.tied_embeddings, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "attn_implementation": "eager", "experts_implementation": "eager",
    } | more  # fmt: skip


def _olmo(spec: ModelSpec) -> Any:
    from transformers import OlmoConfig, OlmoForCausalLM  # seconds, and most tests do without

    return OlmoForCausalLM(OlmoConfig(**_common(spec)))


def _olmo2(spec: ModelSpec) -> Any:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    model = Olmo2ForCausalLM(Olmo2Config(**_common(spec)))
    for layer in model.model.layers:  # attention's own
        layer.self_attn.q_norm, layer.self_attn.k_norm = nn.Identity(), nn.Identity()
    return model


def _gemma2(spec: ModelSpec) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    more = {"head_dim": spec.head_size, "query_pre_attn_scalar": spec.head_size, "sliding_window": 99}
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": spec.logit_softcap}
    return Gemma2ForCausalLM(Gemma2Config(**_common(spec, **more, **caps, hidden_activation="gelu_pytorch_tanh")))


def _gemma3(spec: ModelSpec) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    rope = {"rope_type": "default", "rope_theta": spec.rotary_base}
    more = {"head_dim": spec.head_size, "query_pre_attn_scalar": spec.head_size, "sliding_window": 99}
    ropes = {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    kinds = ["full_attention"] * spec.layers
    return Gemma3ForCausalLM(Gemma3TextConfig(**_common(spec, **more, **ropes, layer_types=kinds)))


def _glm4(spec: ModelSpec) -> Any:
    from transformers import Glm4Config, Glm4ForCausalLM

    more = {"head_dim": spec.head_size, "attention_bias": False}
    return Glm4ForCausalLM(Glm4Config(**_common(spec, **more), partial_rotary_factor=1.0))


def _granite(spec: ModelSpec) -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    scales = {
        "embedding_multiplier": spec.embedding_scale, "residual_multiplier": spec.residual_scale,
        "logits_scaling": 1 / spec.logit_scale, "attention_multiplier": spec.softmax_scale,
    }  # fmt: skip
    return GraniteForCausalLM(GraniteConfig(**_common(spec, **scales)))


def _neox(spec: ModelSpec) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    more = {"layer_norm_eps": spec.norm_epsilon, "hidden_act": "gelu", "use_parallel_residual": True}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_common(spec, **more)))


def _falcon(spec: ModelSpec) -> Any:
    from transformers import FalconConfig, FalconForCausalLM

    more = {
        "layer_norm_epsilon": spec.norm_epsilon, "ffn_hidden_size": spec.ffn_size, "num_kv_heads": spec.num_kv_heads,
        "new_decoder_architecture": spec.parallel_block == "two-norms", "bias": spec.bias,
    }  # fmt: skip
    return FalconForCausalLM(FalconConfig(**_common(spec, **more)))


def _opt(spec: ModelSpec) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(**_common(spec, ffn_dim=spec.ffn_size, word_embed_proj_dim=spec.hidden)))


def _gpt_oss(spec: ModelSpec) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    moe, kinds = spec.moe, ["full_attention"] * spec.layers
    more = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.num_chosen, "head_dim": spec.head_size}
    return GptOssForCausalLM(GptOssConfig(**_common(spec, **more, layer_types=kinds)))


def _llama4(spec: ModelSpec) -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    moe = spec.moe
    more = {
        "num_local_experts": moe.experts, "num_experts_per_tok": moe.num_chosen, "intermediate_size": moe.ffn,
        "intermediate_size_mlp": spec.ffn_size, "interleave_moe_layer_step": moe.every, "head_dim": spec.head_size,
        "use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layers": [1] * spec.layers,
        "attention_chunk_size": 99,
    }  # fmt: skip
    return Llama4ForCausalLM(Llama4TextConfig(**_common(spec, **more)))


_GEMMA_NORMS = {
    "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GEMMA = {
    "norm_place": "around", "activation": "gelu-tanh", "embedding_scale": 48**0.5, "tied_embeddings": True,
    "kv_heads": 2, "head_dim": 14,
}  # fmt: skip
_NEOX = {"norm": "layernorm", "gated_mlp": False, "activation": "gelu"}
_FALCON = {"qkv": "self_attention.query_key_value", "out": "self_attention.dense"} | {
    "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip
_from_falcon = _plain("transformer.word_embeddings", "transformer.h", "transformer.ln_f", "lm_head", _FALCON)
_from_neox = _plain(
    "gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "lm_head",
    {"qkv": "attention.query_key_value", "out": "attention.dense"} | {k: _FALCON[k] for k in ("up", "down")},
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "olmo": Family({"norm": "layernorm", "norm_weight": False}, _olmo, _like_llama, {}),
    "olmo2": Family(
        {"norm_place": "after", "kv_heads": 2}, _olmo2, _like_llama,
        {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    ),
    "gemma2": Family(_GEMMA | {"logit_softcap": 3.0}, _gemma2, _like_llama, _GEMMA_NORMS, adds_one=True),
    "gemma3": Family(_GEMMA | {"qk_norm": True}, _gemma3, _like_llama, _GEMMA_NORMS, adds_one=True),
    "glm4": Family(
        {"norm_place": "around", "kv_heads": 2, "head_dim": 14}, _glm4, _like_llama,
        {
            "attention_norm": "input_layernorm", "attention_out_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm", "mlp_out_norm": "post_mlp_layernorm",
        }, interleaved=True,
    ),
    "granite": Family(
        {"embedding_scale": 3.0, "residual_scale": 0.22, "logit_scale": 0.25, "kv_heads": 3}, _granite, _like_llama
    ),
    "gpt-neox": Family(_NEOX | {"parallel_block": "two-norms", "bias": True}, _neox, _from_neox),
    "falcon-7b": Family(
        _NEOX | {"parallel_block": "one-norm", "kv_heads": 1, "tied_embeddings": True}, _falcon, _from_falcon,
        {"attention_norm": "input_layernorm"},
    ),
    "falcon-40b": Family(
        _NEOX | {"parallel_block": "two-norms", "kv_heads": 2, "tied_embeddings": True}, _falcon, _from_falcon,
        {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
    ),
    "opt": Family(
        {
            "norm": "layernorm", "gated_mlp": False, "activation": "relu", "positions": "learned", "bias": True,
            "position_offset": 2, "tied_embeddings": True,
        }, _opt, _from_opt, {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    ),
    "gpt-oss": Family(
        {
            "kv_heads": 2, "head_dim": 14, "bias": True, "activation": "clamped-silu",
            "moe": {"experts": 5, "top_k": 2, "softmax_over": "chosen", "router_bias": True},
        }, _gpt_oss, _like_llama, larger={"gate_up_proj": 3.0},
    ),
    "llama4": Family(
        {
            "kv_heads": 2, "head_dim": 14, "layers": 3,
            "moe": {
                "experts": 4, "top_k": 1, "ffn": 28, "shared_experts": 1, "gate": "sigmoid", "normalise": False,
                "weigh": "input", "every": 2,
            },
        }, _llama4, _like_llama, interleaved=True, mlp="feed_forward",
    ),
}  # fmt: skip
