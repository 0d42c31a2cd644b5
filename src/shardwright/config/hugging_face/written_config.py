"""Write a model as the config.json of a family that can express it, so that other programs can open trained weights.

All keys that any family has for the model's fields are put into one set. Each family keeps the keys that it reads. The
right family is the first whose reading gives the same model, field by field. So no key is written that is not read.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import FAMILIES, fields_of
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import ACTIVATIONS, Fields
from shardwright.config.hugging_face.same_arithmetic import is_same
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say

# The class name in transformers of each family's model.
_CLASSES = {
    "arcee": "ArceeForCausalLM", "biogpt": "BioGptForCausalLM", "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM", "cwm": "CwmForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM", "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM", "falcon": "FalconForCausalLM", "flex_olmo": "FlexOlmoForCausalLM",
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM", "gpt2": "GPT2LMHeadModel", "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM", "gpt_oss": "GptOssForCausalLM", "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM", "granite_swa": "GraniteSWAForCausalLM", "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM", "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM", "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM", "hy_v3": "HYV3ForCausalLM", "hyperclovax": "HyperCLOVAXForCausalLM",
    "internlm3": "InternLM3ForCausalLM", "jais2": "Jais2ForCausalLM", "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM", "mellum": "MellumForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM", "mpt": "MptForCausalLM", "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM", "phi": "PhiForCausalLM", "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM", "smollm3": "SmolLM3ForCausalLM", "solar_open": "SolarOpenForCausalLM",
    "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM", "vaultgemma": "VaultGemmaForCausalLM",
    "youtu": "YoutuForCausalLM",
}  # fmt: skip
# Families that many programs read come first.
_FIRST = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt2")


def written_config(model: ModelSpec) -> tuple[str, dict[str, Any]]:
    """(family of a model, keys of its config.json). Raises PlanError if no family can express it."""
    for family in (*_FIRST, *(name for name in _CLASSES if name not in _FIRST)):
        for keys in _candidates(model):
            reader = ConfigReader(keys, {})
            FAMILIES[family](reader)
            family_keys = {name: value for name, value in keys.items() if name in reader.names_read}
            family_keys = {"model_type": family} | family_keys
            fields, faults = fields_of(family_keys)
            if not faults and _is_read_as(fields, model):
                return family, {"architectures": [_CLASSES[family]]} | family_keys
    raise PlanError(
        say("model {name}", name=model.name),
        [
            say(
                "no family of Hugging Face's has these layers, so there is no config.json for them; export the weights "
                "under our own names with --names own"
            )
        ],
    )


def _is_read_as(fields: Fields, model: ModelSpec) -> bool:
    """True if the fields that were read give the same model."""
    try:
        return is_same(ModelSpec.model_validate(fields | {"sequence": model.sequence}), model)
    except ValueError:
        return False


def _candidates(model: ModelSpec) -> Iterator[dict[str, Any]]:
    """Sets of keys to try. Some keys mean something else in some families: intermediate_size may be the width of
    experts or of dense layers, logits_scaling a divisor or a factor, and rope_parameters may be those of each kind of
    layers."""
    keys = (
        _shape_keys(model) | _position_keys(model) | _attention_keys(model) | _expert_keys(model) | _scale_keys(model)
    )
    keys = {name: value for name, value in keys.items() if value is not None or name == "sliding_window"}
    yield keys
    if model.logit_scale != 1.0:
        yield keys | {"logits_scaling": model.logit_scale}
    if model.window.size and model.positions == "rotary":
        local = {"rope_type": "default", "rope_theta": model.window.rotary_base or model.rotary_base}
        local = keys["rope_parameters"] | local if model.window.rotary_scaled else local
        yield keys | {"rope_parameters": {"full_attention": keys["rope_parameters"], "sliding_attention": local}}
    if model.moe.experts:
        yield keys | {"intermediate_size": model.moe.ffn_size(model.ffn_size), "intermediate_size_mlp": model.ffn_size}


def _shape_keys(model: ModelSpec) -> dict[str, Any]:
    settings = {fields: name for name, fields in reversed(ACTIVATIONS.items())}
    activation = "silu" if model.activation == "clamped-silu" else settings[model.activation]
    if model.activation == "gelu-tanh":
        activation = "gelu_pytorch_tanh"
    keys: dict[str, Any] = {"vocab_size": model.vocab, "tie_word_embeddings": model.tied_embeddings}
    keys |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), model.layers)
    keys |= dict.fromkeys(("hidden_size", "n_embd", "d_model"), model.hidden)
    keys |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), model.heads)
    keys |= dict.fromkeys(("num_key_value_heads", "num_kv_heads"), model.num_kv_heads)
    keys |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), model.ffn_size)
    keys |= dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), model.norm_epsilon
    )
    keys |= dict.fromkeys(("hidden_act", "activation_function", "hidden_activation", "activation"), activation)
    keys |= dict.fromkeys(("initializer_range", "init_std"), model.init_std)
    keys |= dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), model.longest)
    dropped = (
        "resid_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "dropout",
        "residual_dropout",
        "embedding_dropout",
    )
    return keys | dict.fromkeys(dropped, model.dropout) | {"head_dim": model.head_size}


def _position_keys(model: ModelSpec) -> dict[str, Any]:
    scaling = model.rotary_scaling
    kind = "default" if scaling.kind == "none" else scaling.kind
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": model.rotary_base}
    if model.rotary_dim:
        rope["partial_rotary_factor"] = model.rotary_dim / model.head_size
    if kind != "default":
        rope["factor"] = scaling.factor
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = scaling.trained_sequence
    if kind == "llama3":
        rope |= {"low_freq_factor": scaling.slow, "high_freq_factor": scaling.turns_that_stay}
    if kind == "yarn":
        rope |= {"beta_fast": scaling.turns_that_stay, "beta_slow": scaling.slow}
        rope |= {"truncate": scaling.truncate} if not scaling.truncate else {}
        if scaling.mscale_all_dim:
            rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    if kind == "longrope":
        rope |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.magnitude:
        rope["attention_factor"] = scaling.magnitude
    if model.temperature_tuning.in_all_layers:
        rope["llama_4_scaling_beta"] = model.temperature_tuning.scale
    keys: dict[str, Any] = {"alibi": model.positions == "alibi", "rotary_dim": model.rotary_width}
    if model.positions == "rotary":
        keys["rope_parameters"] = rope
    if model.no_rotary_every:
        keys["no_rope_layer_interval"] = model.no_rotary_every
    elif model.positions == "rotary":
        keys["no_rope_layers"] = [1] * model.layers
    return keys


def _attention_keys(model: ModelSpec) -> dict[str, Any]:
    window, layers = model.window, range(model.layers)
    window_kind = "chunked_attention" if window.chunked else "sliding_attention"
    has_windows = any(map(model.is_windowed, layers))
    kinds = [window_kind if model.is_windowed(layer) else "full_attention" for layer in layers]
    keys: dict[str, Any] = {
        "attention_bias": model.has_attention_bias or model.qkv_bias, "qkv_bias": model.qkv_bias or model.bias,
        "mlp_bias": model.has_mlp_bias, "use_qkv_bias": model.qkv_bias, "use_bias": model.bias, "bias": model.bias,
        "enable_bias": model.bias,
        "layer_types": kinds if has_windows else None,
        "layer_rope_theta": [window.rotary_base if model.is_windowed(layer) and window.rotary_base
                             else model.rotary_base for layer in layers],
        "sliding_window": window.size if has_windows and not window.chunked else None,
        "attention_chunk_size": window.size if has_windows and window.chunked else None,
        "use_sliding_window": has_windows, "max_window_layers": window.first_full,
        "attn_logit_softcapping": model.attention_softcap or None, "clip_qkv": model.clip_qkv or None,
        "use_qk_norm": model.qk_norm != "none",
        "query_pre_attn_scalar": _whole(model.attention_scale**-2) if model.attention_scale else None,
        "attention_multiplier": model.attention_scale or None, "use_post_norm": model.norm_place == "around",
        "attn_config": {"clip_qkv": model.clip_qkv or None, "softmax_scale": model.attention_scale or None},
        "attn_temperature_tuning": model.temperature_tuning.scale > 0,
        "attn_scale": model.temperature_tuning.scale, "floor_scale": model.temperature_tuning.floor,
        "rope_local_base_freq": window.rotary_base or None, "multi_query": model.num_kv_heads == 1,
        "new_decoder_architecture": model.parallel_block == "two-norms",
        "parallel_attn": model.parallel_block != "none",
        "use_parallel_residual": model.parallel_block != "none",
    }  # fmt: skip
    if model.is_latent:
        latent = model.latent
        keys |= {
            "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim, "v_head_dim": latent.value_dim, "num_key_value_heads": model.heads,
            "head_dim": latent.rope_dim,
        }  # fmt: skip
    return keys


def _whole(value: float) -> float:
    """The integer that a number is but for its rounding, because transformers takes no other; else the number."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value


def _expert_keys(model: ModelSpec) -> dict[str, Any]:
    moe = model.moe
    if not moe.experts:
        return {}
    keys: dict[str, Any] = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), moe.experts)
    shared = moe.shared_size(model.ffn_size)
    dense = moe.first_dense
    return keys | {
        "moe_topk": moe.num_chosen, "moe_num_experts": moe.experts, "moe_k": moe.num_chosen,
        "moe_num_shared_experts": moe.shared_experts,
        "moe_layer_start_index": dense, "moe_layer_interval": moe.every,
        "num_shared_experts": moe.shared_experts, "router_scaling_factor": moe.routed_scaling,
        "n_group": moe.num_groups, "topk_group": moe.groups_kept,
        "num_experts_per_tok": moe.num_chosen, "moe_intermediate_size": moe.ffn_size(model.ffn_size),
        "norm_topk_prob": moe.normalise, "routed_scaling_factor": moe.routed_scaling,
        "n_shared_experts": moe.shared_experts, "first_k_dense_replace": moe.first_dense,
        "shared_expert_intermediate_size": shared, "shared_intermediate_size": shared,
        "decoder_sparse_step": moe.every, "mlp_only_layers": list(range(moe.first_dense)),
        "interleave_moe_layer_step": moe.every, "num_mtp_layers": model.mtp_layers,
        "topk_method": "group_limited_greedy" if moe.num_groups > 1 and moe.gate == "softmax" else None,
    }  # fmt: skip


def _scale_keys(model: ModelSpec) -> dict[str, Any]:
    return {
        "embedding_multiplier": model.embedding_scale, "residual_multiplier": model.residual_scale,
        "logits_scaling": 1.0 / model.logit_scale, "logit_scale": model.logit_scale,
        "final_logit_softcapping": model.logit_softcap or None,
        "layer_norm_elementwise_affine": model.norm_weight,
    }  # fmt: skip


def config_bytes(keys: dict[str, Any]) -> bytes:
    """Keys as the contents of a config.json."""
    return json.dumps(keys, indent=2, sort_keys=True).encode() + b"\n"
